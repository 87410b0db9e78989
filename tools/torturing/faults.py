"""All faults of tools/torture.py, in the order of its table."""

from __future__ import annotations

from tools.torturing.damages import damages
from tools.torturing.judges import judges
from tools.torturing.machine import of_surroundings, of_the_machine
from tools.torturing.moments import beside_the_steps, kills_and_signals
from tools.torturing.resumes import resumes
from tools.torturing.rewards import of_rewards

FAULTS = [
    *kills_and_signals(), *beside_the_steps(), *damages(), *of_the_machine(), *of_rewards(), *judges(), *of_surroundings(), *resumes(),
]  # fmt: skip
SHORT = {"chain/killed, stopped, damaged"}
