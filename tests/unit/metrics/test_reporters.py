"""Trackers: the data that they receive, with the real libraries where installed, and that none blocks a run."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from megatron_grpo.core.metadata import Progress
from megatron_grpo.run.metrics import reporters
from megatron_grpo.run.metrics.reporters import ReporterInit, report_to_problems, services
from tests.evaluated import evaluated
from tests.loggers import logger_in

ROOT = Path(__file__).resolve().parents[3]
TABLE = {"prompt": ["1+1=", "2+2="], "completion": ["2", "five"], "reward": [1.0, None]}


def two_steps(folder, *names, **settings):
    metrics = logger_in(folder, config={"report_to": names, "lr": 1e-6, "reward_funcs": ["accuracy"], "beta": None, **settings})
    metrics.start(Progress())
    for step in (1, 2):
        metrics._services.keep_completions(step - 1, TABLE)
        metrics.log(Progress(step=step, num_tokens=step), {"reward": step / 2, "kl": float("nan"), "time/step": 0.1})
    metrics.evaluation(Progress(step=2), [evaluated(0.5, accuracy=0.5)])
    metrics.close()


class RecordingReporter:
    """A reporter that records its calls in the process."""

    def __init__(self, begin: ReporterInit):
        self.told = [begin]
        RecordingReporter.latest = self

    def log(self, step, values):
        self.told.append((step, sorted(values)))

    def completions(self, step, table):
        self.told.append((step, table))

    def close(self):
        self.told.append("closed")


def test_reporter_receives_settings_steps_completions_and_close(tmp_path, monkeypatch):
    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", RecordingReporter)
    monkeypatch.setattr(reporters, "MOST_ROWS", 1)
    two_steps(tmp_path / "a run", "tensorboard", run_name="mine", project="ours")
    begin, *told = RecordingReporter.latest.told
    assert (begin.first_step, begin.name_or(), begin.project_or("X"), begin.config["lr"]) == (1, "mine", "ours", 1e-6)
    first_row = {name: column[:1] for name, column in TABLE.items()}
    names = ["num_tokens", "reward", "time/step", "tokens_per_second"]
    of_eval = ["eval/" + name for name in "accuracy mean@1 mean@1/stderr_seed n num_prompts pass@1 temperature unscored".split()]
    assert told == [(1, names), (1, first_row), (2, names), (2, first_row), (2, of_eval), "closed"]


def test_reporter_with_logging_steps_receives_means_and_final_rest(tmp_path, monkeypatch):
    told = []

    class RecordingValues(RecordingReporter):
        def log(self, step, values):
            told.append((step, values))

    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", RecordingValues)
    metrics = logger_in(tmp_path, config={"report_to": ("tensorboard",), "logging_steps": 3}, total_steps=10)
    metrics.start(Progress())
    for step in range(1, 5):
        more = {"reward": float(step)} if step != 2 else {}  # a step without a rollout of its own
        metrics.log(Progress(step=step, num_tokens=10 * step), {"loss": step**2, "time/step": 0.1, **more})
    metrics.close()
    assert [(step, values["loss"], values["reward"], values["num_tokens"]) for step, values in told] == [
        (3, 14 / 3, 2.0, 30),
        (4, 16, 4.0, 40),
    ]
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 4, 9, 16]


def test_reporter_run_name_from_settings_then_variable_then_output_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    assert ReporterInit(output_dir=tmp_path, config={"project": "ours"}).project_or("WANDB_PROJECT") == "ours"
    assert ReporterInit(output_dir=tmp_path).project_or("WANDB_PROJECT") == "theirs"
    assert ReporterInit(output_dir=tmp_path).project_or("SWANLAB_PROJECT") == "megatron-grpo"
    assert ReporterInit(output_dir=tmp_path).name_or() == tmp_path.name


def test_report_to_all_selects_installed_reporters_once(monkeypatch):
    monkeypatch.setattr(reporters, "is_installed", lambda name: name in ("wandb", "mlflow"))
    assert services(["all"]) == ["wandb", "mlflow"] and services(["mlflow", "all", "mlflow"]) == ["mlflow", "wandb"]
    assert services(["none"]) == [] and report_to_problems(["all"]) == []
    [problem] = report_to_problems(["all", "swanlab"])
    assert "pip install 'megatron-grpo[swanlab]'" in problem.message


class HangingReporter:
    """A reporter that hangs at the beginning, at a step or at the end."""

    def __init__(self, at, until):
        self.at, self.until = at, until
        self.may_hang("beginning")

    def may_hang(self, place):
        if place == self.at:
            self.until.wait(30)

    def log(self, step, values):
        self.may_hang("step")

    def completions(self, step, table):
        pass

    def close(self):
        self.may_hang("end")


@pytest.mark.parametrize("at", ["beginning", "step", "end"])
def test_reporter_that_hangs_does_not_block_steps_and_delays_end_briefly(tmp_path, monkeypatch, caplog, at):
    until = threading.Event()
    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", lambda begin: HangingReporter(at, until))
    monkeypatch.setattr(reporters, "SECONDS_TO_CLOSE", 0.3)
    began = time.monotonic()
    two_steps(tmp_path, "tensorboard")
    until.set()
    assert time.monotonic() - began < 20
    assert [record.getMessage() for record in caplog.records if "tensorboard" in record.getMessage()] == [
        "tensorboard failed, and the run continues without it: it has not received everything 0.3 s after the end"
    ]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_reporter_with_too_many_queued_messages_is_disabled(tmp_path, monkeypatch, caplog):
    until = threading.Event()
    monkeypatch.setitem(reporters.REPORTERS, "tensorboard", lambda begin: HangingReporter("beginning", until))
    monkeypatch.setattr(reporters, "MOST_WAITING", 3)
    two_steps(tmp_path, "tensorboard")
    until.set()
    assert "tensorboard failed, and the run continues without it: it is 3 messages behind" in caplog.text


class WandbLikeModule:
    """A module with the interface of wandb under any name; its functions have only the parameters of the real one."""

    def __init__(self, parameters):
        self.told, self.parameters = [], parameters

    def init(self, **given):
        assert given.keys() <= self.parameters, given.keys() - self.parameters
        self.told.append(given)

    def log(self, metrics, step=None):
        self.told.append((step, {name: value for name, value in metrics.items() if name in ("reward", "completions", "eval/accuracy")}))

    def finish(self):
        self.told.append("finished")

    def Table(self, columns=None, data=None, dataframe=None):
        return [list(columns), *data] if dataframe is None else [list(dataframe.columns), *dataframe.values.tolist()]


INTERFACES = {  # parameters of `init` as the services document them; the tests below ask the real ones where they are installed
    "wandb": {"project", "name", "dir", "config", "resume", "settings", "id", "entity", "group", "tags"},
    "swanlab": {"project", "experiment_name", "logdir", "config", "workspace", "description", "mode", "resume", "id"},
    "trackio": {"project", "name", "group", "space_id", "space_storage", "dataset_id", "config", "resume", "settings", "private", "embed"},
}


@pytest.mark.parametrize("name", INTERFACES)
def test_wandb_like_reporters_receive_project_name_settings_steps_and_tables(tmp_path, monkeypatch, caplog, name):
    module = WandbLikeModule(INTERFACES[name])
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(reporters, "is_installed", lambda name: True)
    monkeypatch.setenv("TRACKIO_SPACE_ID", "me/here")
    monkeypatch.setenv("TRACKIO_DIR", "")  # `trackio` sets it
    monkeypatch.delenv("TRACKIO_DIR")
    two_steps(tmp_path / "run", name, run_name="mine", project="ours")
    begun, *told = module.told
    assert "failed" not in caplog.text
    assert (begun["project"], begun.get("name", begun.get("experiment_name")), begun["config"]["lr"]) == ("ours", "mine", 1e-6)
    assert begun.get("resume") == (None if name == "swanlab" else "allow") and begun.get("space_id") == (
        "me/here" if name == "trackio" else None
    )
    rows = [list(TABLE), ["1+1=", "2", 1.0], ["2+2=", "five", None]]
    heard = [(step, list(values)) for step, values in told[:-1]]
    tables = [] if name == "swanlab" else ["completions"]
    assert heard == [
        (1, ["reward"]),
        *((1, [one]) for one in tables),
        (2, ["reward"]),
        *((2, [one]) for one in tables),
        (2, ["eval/accuracy"]),
    ]
    assert told[-1] == "finished"
    assert os.environ.get("TRACKIO_DIR") == (str(tmp_path / "run" / "trackio") if name == "trackio" else None)
    for _, values in told[:-1]:
        if "completions" in values:
            [head, first, second] = values["completions"]
            assert [head, first, second[:2]] == [*rows[:2], rows[2][:2]] and second[2] != second[2] or second[2] is None


# ---- the real ones ---------------------------------------------------------------------------------------------------------------------


def skip_without(name):
    absent = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(absent, reason=f"{name} is not installed (pip install 'megatron-grpo[{name}]')")


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Nothing reaches a network, and nothing is written outside tmp_path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@skip_without("wandb")
def test_wandb_offline(alone, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "offline")
    two_steps(alone / "run", "wandb", run_name="mine", project="ours")
    assert "failed" not in caplog.text
    [file] = (alone / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    for part in (b"ours", b"mine", b"reward", b"eval/accuracy", b"completions", b"accuracy"):
        assert part in written, part
    tables = [json.loads(path.read_text()) for path in (alone / "run" / "wandb").glob("offline-run-*/files/media/table/*.json")]
    assert len(tables) == 2 and all(table["columns"] == list(TABLE) for table in tables)
    assert tables[0]["data"] == [["1+1=", "2", 1.0], ["2+2=", "five", None]]


@skip_without("wandb")
def test_wandb_without_network_does_not_block_run_or_process_exit(alone):
    program = f"""
from pathlib import Path
from megatron_grpo.run.metrics import reporters
from tests.unit.metrics.test_reporters import two_steps
reporters.SECONDS_TO_CLOSE = 5.0
Path("run").mkdir()
two_steps(Path({str(alone)!r}) / "run", "wandb")
"""
    own = {"WANDB_MODE": "online", "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40, "PYTHONPATH": str(ROOT)}
    finish_reason = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | own, cwd=alone, capture_output=True, text=True, timeout=120
    )
    assert finish_reason.returncode == 0, finish_reason.stderr
    assert len((alone / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert (finish_reason.stdout + finish_reason.stderr).count("wandb failed, and the run continues without it") == 1


@skip_without("mlflow")
def test_mlflow_in_files(alone, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{alone}/mlflow.db")
    monkeypatch.setattr(reporters, "SECONDS_TO_CLOSE", 120.0)  # it makes its tables first
    two_steps(alone / "run", "mlflow", run_name="mine", project="ours")
    assert "failed" not in caplog.text
    import mlflow

    [found] = mlflow.search_runs(experiment_names=["ours"], output_format="list")
    assert found.info.run_name == "mine" and found.data.params["lr"] == "1e-06" and found.info.status == "FINISHED"
    assert (found.data.metrics["reward"], found.data.metrics["eval/accuracy"]) == (1.0, 0.5) and "kl" not in found.data.metrics
    table = mlflow.load_table("completions/step_000002.json", run_ids=[found.info.run_id])
    assert table["completion"].tolist() == ["2", "five"]


@skip_without("mlflow")
def test_mlflow_without_server_does_not_end_the_run(alone, monkeypatch, caplog):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(reporters, "SECONDS_TO_CLOSE", 3.0)
    two_steps(alone / "run", "mlflow")
    assert caplog.text.count("mlflow failed, and the run continues without it") == 1


@skip_without("swanlab")
def test_swanlab_offline(alone, monkeypatch, caplog):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    two_steps(alone / "run", "swanlab", run_name="mine", project="ours")
    assert "failed" not in caplog.text and any((alone / "run" / "swanlab").rglob("*"))


TRACKIO_RUN = """
from pathlib import Path
from tests.unit.metrics.test_reporters import reporters, two_steps
reporters.SECONDS_TO_CLOSE = 120.0
two_steps(Path("run"), "trackio", run_name="mine", project="ours")
"""


@skip_without("trackio")
@pytest.mark.parametrize("named", [None, "elsewhere"])
def test_trackio_writes_into_output_dir_unless_trackio_dir_names_another_directory(alone, named):
    """In a process of its own, as trackio reads TRACKIO_DIR once, at its import."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRACKIO_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])} | ({} if named is None else {"TRACKIO_DIR": named})
    command = [sys.executable, "-c", TRACKIO_RUN]
    done = subprocess.run(command, env=environment, cwd=alone, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "failed" not in done.stderr, done.stderr
    [file] = alone.rglob("*.db")
    assert file == (alone / "run" / "trackio" if named is None else alone / named) / "ours.db"
    with closing(sqlite3.connect(file)) as database:
        [(name, config)] = database.execute("select run_name, config from configs")
        rows = [(step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics order by id")]
    assert (name, json.loads(config)["lr"]) == ("mine", 1e-6)
    numbers = ["num_tokens", "reward", "time/step", "tokens_per_second"]  # no `step`: Trackio renames a metric of that name
    assert [(step, [*values]) for step, values in rows[:4]] == [(1, numbers), (1, ["completions"]), (2, numbers), (2, ["completions"])]
    assert [values["reward"] for _, values in rows if "reward" in values] == [0.5, 1.0]
    assert rows[1][1]["completions"]["_value"][0] == {"prompt": "1+1=", "completion": "2", "reward": 1.0}
    assert rows[4][0] == 2 and rows[4][1]["eval/accuracy"] == 0.5 and "eval/step" not in rows[4][1]
