"""The page that `report` writes, in a real browser if one is installed."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from megatron_grpo.cli import main
from megatron_grpo.commands.analysis import run_report
from megatron_grpo.commands.analysis.run_files import RunFiles, format_text, runs_in
from megatron_grpo.core.base.errors import ConfigError
from megatron_grpo.run.metrics.records import write_table

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '</script><script>document.title="owned"</script><img src=x onerror="document.title=1">\u202e\x07 ]]>--><b>'
PHASES = {"rollout": 0.25, "train": 0.5, "other": 0.25}
CONTRAST = """() => {
    const light = c => {
        const v = c.match(/[\\d.]+/g).slice(0, 3).map(x => { x /= 255; return x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4; });
        return .2126 * v[0] + .7152 * v[1] + .0722 * v[2];
    };
    const ground = e => {
        const c = getComputedStyle(e).backgroundColor;
        return c === "rgba(0, 0, 0, 0)" ? ground(e.parentElement) : c;
    };
    document.querySelectorAll("details").forEach(e => { e.open = true; });
    const found = [...document.querySelectorAll("h1,h2,h3,th,td,p,a,span,summary,pre,code,button")].filter(e => e.textContent.trim());
    return Math.min(...found.map(e => {
        const a = light(getComputedStyle(e).color), b = light(ground(e));
        return (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    }));
}"""


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def write_run(folder, *, steps=80, answer="4", lr=1e-6, factor=1.0, events=()):
    """The files of a run of `steps` optimizer steps with two rewards, of which two evaluations and one rollout are written."""
    folder.mkdir()
    metrics = [
        {
            "step": n, "num_tokens": 100 * n, "reward": factor * n / 80, "rewards/right/mean": n / 160, "rewards/short/mean": 0.5,
            "sampling/sampling_logp_difference/max": 1e-5 * n, "grad_norm": 1.0 + n % 3, "learning_rate": lr, "kl": 0.0,
            "skipped_iterations": 0, "time/step": 1.0, **{f"time/{name}": seconds for name, seconds in PHASES.items()},
        }
        for n in range(1, steps + 1)
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", metrics)
    mean = {"name": "eval", "n": 1, "score": "right"}
    write_lines(folder / "evaluations.jsonl", [{"step": 0, **mean, "mean@1": 0.25}, {"step": steps, **mean, "mean@1": 0.75}])
    if events:
        write_lines(folder / "events.jsonl", events)
    row = {"micro_step": 0, "optimizer_step": 0, "rollout": 0, "pass": 0, "sampled_by_version": 0, "staleness": 0}
    row |= {"old_logprobs": "on_policy", "rows": [[0, 4], [4, 8]]}
    versions = {"megatron_grpo": "0.1.0", "torch": "2.13.0", "driver": "570.1"}
    (folder / "plan.json").write_text(
        json.dumps({"timetable": [row], "warnings": ["A plan's <b>."], "num_steps": 80, "versions": versions})
    )
    (folder / "config.yaml").write_text(f"optimizer:\n  lr: {lr}\nrun:\n  max_steps: {steps}\n")
    for step, scores, texts in ((0, [0.0, 0.0, 1.0, 0.0], ["5"] * 4), (steps, [1.0, 1.0, 0.0, 0.0], [answer] * 4)):
        columns = {"dataset_row": [0, 1, 2, 3], "generation": [0] * 4, "prompt": ["2+2="] * 4, "completion": texts}
        write_table(folder / f"evaluations/eval/step_{step:06d}.parquet", columns | {"rewards/right": scores, "rewards/short": [1.0] * 4})
    prompt = json.dumps([{"role": "user", "content": "2+2?"}])
    group = {"prompt_number": [0, 0, 1, 1], "version": [3] * 4, "prompt": [prompt] * 4, "completion": [answer, "5", "6", "7"]}
    write_table(folder / "completions/step_000003.parquet", group | {"reward": [0.0, 1.0, 0.5, 0.5]})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("a") / "first")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def open_page(browser, folder, runs, **context):
    """The page of these runs, without a network, with what it requests and what it prints on the console."""
    path = folder / "page.html"
    path.write_text(run_report.make_page(runs_in(runs)), encoding="utf-8")
    page = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "offline": True} | context).new_page()
    page.requested, page.printed = [], []
    page.on("request", lambda request: page.requested.append(request.url))
    page.on("console", lambda message: page.printed.append(message.text))
    page.on("pageerror", lambda error: page.printed.append(str(error)))
    page.goto(f"file://{path}")
    page.wait_for_function("document.querySelectorAll('canvas').length > 0")
    return page


def test_report_page_makes_no_requests_and_draws_every_figure(browser, tmp_path, run):
    page = open_page(browser, tmp_path, [run])
    assert page.requested == [f"file://{tmp_path}/page.html"] and page.printed == []
    assert page.locator("canvas").count() == page.locator("figure").count() == 5
    page.locator("#theme").click()
    assert page.locator("canvas").count() == 5 and page.printed == []


def test_report_page_blocks_foreign_scripts(browser, tmp_path, run):
    page = open_page(browser, tmp_path, [run])
    page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x.png\">')")
    page.evaluate("document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = \"owned\"'}))")
    assert "owned" not in page.title() and len(page.printed) == 2 and all("Content Security Policy" in line for line in page.printed)


def test_report_page_escapes_text_of_a_model(browser, tmp_path):
    page = open_page(browser, tmp_path, [write_run(tmp_path / "a<b>run", answer=HOSTILE)])
    assert page.title() == "a<b>run – megatron-grpo" and page.printed == []
    assert page.locator("main script, main img, main b, h1 b").count() == 0
    shown = page.locator(".answers pre").all_inner_texts()
    assert any(text.startswith(HOSTILE[:80]) and "\\u202e\\u0007" in text for text in shown) and "\u202e" not in "".join(shown)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(browser, tmp_path, run, scheme):
    other = write_run(tmp_path / "other", lr=2e-6)
    assert open_page(browser, tmp_path, [run, other], color_scheme=scheme).evaluate(CONTRAST) >= 4.5


@pytest.mark.parametrize("names", [["first"], ["first", "other"]])
def test_report_page_fits_a_phone_screen(browser, tmp_path, names):
    event = {"step": 3, "time": "2026-01-02T03:04:05+00:00", "kind": "warning", "text": "A long sentence of a run. " * 9}
    runs = [write_run(tmp_path / name, events=[event]) for name in names]
    page = open_page(browser, tmp_path, runs, viewport={"width": 360, "height": 740})
    assert page.locator("td.text").first.evaluate("e => e.getBoundingClientRect().right") <= 360, "seen without scrolling in its table"
    page.evaluate("document.querySelectorAll('details').forEach(e => { e.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("Math.max(...[...document.querySelectorAll('canvas')].map(e => e.getBoundingClientRect().right))") <= 360


def test_every_figure_is_described_and_has_its_numbers_in_a_table(browser, tmp_path, run):
    page = open_page(browser, tmp_path, [run])
    for figure in page.locator("figure").all():
        assert "at step" in figure.locator("[role=img]").get_attribute("aria-label")
        assert figure.locator("details table tbody tr").count() > 2
    rows = [row.locator("th, td").all_text_contents() for row in page.locator("figure").first.locator("details tbody tr").all()]
    assert [rows[0], rows[-1]] == [["0", "–", "–", "–", "0.25"], ["80", "1", "0.5", "0.5", "0.75"]]
    assert page.evaluate("[...document.querySelectorAll('nav a')].every(a => document.querySelector(a.hash))")


def test_two_runs_are_curves_of_one_figure_and_settings_that_differ_are_marked(browser, tmp_path, run):
    other = write_run(tmp_path / "other", lr=2e-6, factor=0.5, steps=40)
    page = open_page(browser, tmp_path, [run, other])
    words = page.locator("[role=img]").first.get_attribute("aria-label")
    assert "first: training: 0.0125 at step 1, 1 at step 80" in words and "other: training: 0.00625 at step 1, 0.25 at step 40" in words
    rows = [row.inner_text().split() for row in page.locator("h2#settings + .wide tbody tr").all()]
    assert rows == [["lr", "differs", "1e-06", "2e-06"], ["max_steps", "differs", "80", "40"]]
    assert page.locator("#versions + .wide .differs").count() == 0


def test_report_page_counts_changed_answers_and_shows_worse_ones(run):
    found = run_report.describe_run(RunFiles(run))
    assert found["counts"] == (2, 1, 1)
    assert [(one["before"], one["after"], one["score_before"], one["score_after"]) for one in found["answers"]] == [
        ("5", "4", 0.0, 1.0), ("5", "4", 0.0, 1.0), ("5", "4", 1.0, 0.0),
    ]  # fmt: skip
    [group] = found["groups"]
    assert [(row["completion"], row["reward"]) for row in group] == [("5", 1.0), ("4", 0.0)]
    assert "<pre>user: 2+2?</pre></td><td><pre>5</pre></td><td><pre>4</pre>" in run_report.make_page(runs_in([run]))
    assert found["phases"] == [("training", 40.0, 0.5), ("sampling", 20.0, 0.25), ("other", 20.0, 0.25)]


@pytest.mark.parametrize(
    ("kind", "steps", "words"),
    [
        ("stopped", 40, "It stopped."),
        ("failed", 80, "It stopped."),
        ("resumed", 40, "The end of the run is not recorded"),
        ("warning", 80, "The run is finished."),
    ],
)
def test_report_page_shows_how_the_run_ended(tmp_path, kind, steps, words):
    event = {"step": steps, "time": "2026-01-02T03:04:05+00:00", "kind": kind, "text": "It stopped."}
    page = run_report.make_page(runs_in([write_run(tmp_path / "run", steps=steps, events=[event])]))
    assert f'<p class="end">{words}' in page and "2026-01-02 03:04:05" in page


def test_report_page_without_plan_file_states_that_it_is_missing(tmp_path):
    run = write_run(tmp_path / "run")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    write_lines(run / "metrics.jsonl", [first | {"step": n, "sampling/sampling_logp_difference/max": 0.5} for n in (1, 2)])
    (run / "plan.json").unlink()
    page = run_report.make_page(runs_in([run]))
    assert "0.5 nats" in page and "no plan.json" in page


def test_report_page_of_long_run_is_small(tmp_path):
    run = write_run(tmp_path / "run")
    first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    write_lines(run / "metrics.jsonl", [first | {"step": n, "reward": n % 7 + 1 / 3, "grad_norm": n / 7} for n in range(1, 20_001)])
    page = run_report.make_page(runs_in([run]))
    assert len(page) < 1_500_000 and "grad_norm" in page
    data = json.loads(re.search(r'id="data">(.*)</script>', page)[1])
    assert all(len(figure["values"][0]) <= run_report.MOST_POINTS + 2 for figure in data)


def test_report_command_writes_page_into_run_or_to_output_path(tmp_path, capsys, monkeypatch):
    run, other = write_run(tmp_path / "run"), write_run(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    cases = [
        ([run], run / "report.html"),
        ([run], run / "report.html"),
        ([run, other], tmp_path / "report.html"),
        ([run, "-o", tmp_path / "a.html"], tmp_path / "a.html"),
        ([f"--output={tmp_path}/b.html", run], tmp_path / "b.html"),
    ]
    for argv, target in cases:
        assert main(["report", *map(str, argv)]) == 0
        assert f"Report: {target} (" in capsys.readouterr().out and "<!DOCTYPE html>" in target.read_text()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ([], "No output_dir of a run is named."),
        (["run", "--lr", "1"], "Unknown argument --lr."),
        (["run", "-o"], "-o needs a file."),
        (["run", "-o", "mine.html"], "mine.html exists and was not written by this command. Name another file with -o."),
        (["run", "-o", "no/a.html"], "no/a.html cannot be written: No such file or directory. Name another file with -o."),
        (["missing"], "missing is not a folder. Name the output_dir of a run that has trained for at least one optimizer step."),
        (["run", "empty"], "empty has no optimizer step in metrics.jsonl. Name the output_dir"),
    ],
)
def test_report_command_with_invalid_arguments_raises_config_error(tmp_path, monkeypatch, argv, sentence):
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.html").write_text("<p>mine")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        run_report.run_report(argv)
    assert (tmp_path / "mine.html").read_text() == "<p>mine"


def test_runs_with_the_same_folder_name_have_different_names(tmp_path):
    folders = []
    for parent in ("a", "b"):
        (tmp_path / parent).mkdir()
        folders.append(write_run(tmp_path / parent / "out"))
    assert [run.name for run in runs_in(folders)] == ["a/out", "b/out"]


def test_report_text_is_truncated_and_control_characters_are_escaped():
    assert format_text("ab\u202ec\x1bd\ne", max_characters=100) == "ab\\u202ec\\u001bd\ne"
    assert format_text("x" * 12, max_characters=10) == "x" * 10 + " … (2 more characters)"
    assert format_text('[{"not": "a conversation"}]', max_characters=100) == '[{"not": "a conversation"}]'


def test_report_and_watch_show_number_of_completions_behind_token_means(tmp_path, capsys):
    """Two steps of 8 completions, of which 5 and none are computed."""
    run = write_run(tmp_path / "run", steps=2)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    counts = ({"packing/completions": 8, "packing/computed_completions": computed} for computed in (5, 0))
    (run / "metrics.jsonl").write_text("".join(json.dumps(step | count) + "\n" for step, count in zip(steps, counts, strict=True)))
    page = run_report.make_page(runs_in([run]))
    assert re.search(r"over which token metrics are means<[^5]*5 of 16", page)
    assert "Completions of a step" in page and "means over those that are computed" in page
    other = write_run(tmp_path / "other", steps=2)
    assert "token metrics are means" not in run_report.make_page(runs_in([other])), "an older run does not say it"
    assert main(["watch", str(run)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"completions +8", told) and re.search(r"computed +0", told)
