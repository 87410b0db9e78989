"""Table of all faults of tools/torture.py, in the order of the report."""

from __future__ import annotations

from tools.torturing.damages import list_damages
from tools.torturing.judges import list_judge_faults
from tools.torturing.machine import list_environment_faults, list_machine_faults
from tools.torturing.moments import list_async_save_faults, list_kills_and_signals
from tools.torturing.resumes import list_resumes
from tools.torturing.rewards import list_reward_faults

FAULTS = [
    *list_kills_and_signals(),
    *list_async_save_faults(),
    *list_damages(),
    *list_machine_faults(),
    *list_reward_faults(),
    *list_judge_faults(),
    *list_environment_faults(),
    *list_resumes(),
]
SHORT = {"chain/killed, stopped, damaged"}
