"""The page in a headless browser: curves are drawn, and text of a model is text."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.main import main
from tests.unit.output.report.example_run import HOSTILE, make_run, step_row, write_log

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
         "--disable-background-networking", "--disable-component-update", "--virtual-time-budget=3000")  # fmt: skip

pytestmark = pytest.mark.skipif(BROWSER is None, reason=f"no browser is installed ({', '.join(NAMES)})")


def open_page(page: Path, profile: Path) -> str:
    """Return the document after its script has run."""
    command = [BROWSER or "", *FLAGS, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def test_the_page_of_a_run_draws_its_curves_and_shows_completions_as_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run)]) == 0
    dom = open_page(run / "report.html", tmp_path / "profile")
    assert "<title>run: GRPO run</title>" in dom  # not the title that the completion would set
    body = dom.split('id="data"')[0]
    for chart in ("Reward", "Reward functions", "Completion length", "KL to the reference", "Loss", "Gradient norm"):
        drawn = re.search(f'data-chart="{chart}".*?</svg>', body, re.DOTALL)
        assert drawn and re.search(r'<path class="curve" d="M[\d.]+ [\d.]+(L[\d.]+ [\d.]+){5}"', drawn[0]), chart
    assert 'data-chart="Time of a step by phase"' in body and 'data-chart="histogram total reward"' in body
    assert "no staleness is logged" in body and "the run had no GPU" in body
    assert html.escape(HOSTILE, quote=False) in body
    assert "<img" not in body and body.count("<script") == 1  # that of the data, cut above, begins here


def test_the_page_of_two_runs_draws_both(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=8, lr=0.001)]
    target = tmp_path / "both.html"
    assert main(["report", *map(str, runs), "--output_file", str(target)]) == 0
    body = open_page(target, tmp_path / "profile").split('id="data"')[0]
    reward = re.search('data-chart="Reward".*?</svg>', body, re.DOTALL)
    assert reward and reward[0].count('class="curve"') == 2 and "one" in reward[0] and "two" in reward[0]
    assert "--lr" in body and "6 of 10" in body and "8 of 10" in body


def test_no_value_is_wider_than_its_tile(tmp_path: Path) -> None:
    write_log(tmp_path / "run", [step_row(step, 10) | {"reward": -1.2345e-4 * step} for step in range(1, 9)])
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / "report.html"
    measure = (
        "document.title = [...document.querySelectorAll('.tile b')].filter((b) => b.scrollWidth > b.clientWidth).length"
    )
    page.write_text(page.read_text().replace("</body>", f"<script>{measure}</script></body>"))
    assert "<title>0</title>" in open_page(page, tmp_path / "profile")
