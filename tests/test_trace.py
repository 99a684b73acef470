"""Traces: spans, a digest that two equal runs share, a file that Perfetto reads; and the tuner's moves in metrics."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from ebrl.cli import main
from ebrl.core.readings import Move, Reading
from ebrl.core.scope import Scope
from ebrl.core.trace import Trace
from ebrl.core.tuner import Tuner
from ebrl.core.virtual import run_virtual
from ebrl.core.virtual_machine import VirtualMachine


def record(seed: int) -> Trace:
    """Run four lanes in virtual time and write down when each call ended."""
    trace = Trace()

    async def work(machine: VirtualMachine, number: int) -> None:
        loop, lane = asyncio.get_running_loop(), machine.lane("sim", f"sim-{number}")
        for index in range(20):
            began = loop.time()
            await lane.run(int)
            trace.span(f"env-{number}", "step", began, loop.time(), index=index)

    async def main() -> None:
        machine = VirtualMachine({"sim": lambda n, rng: float(rng.lognormal())}, num_cores=2, seed=seed)
        async with Scope() as scope:
            await asyncio.wait([scope.start(work(machine, i), f"env-{i}") for i in range(4)])

    run_virtual(main())
    return trace


def test_equal_runs_have_equal_digests() -> None:
    assert len({record(seed=3).digest() for _ in range(3)}) == 1
    assert record(seed=3).digest() != record(seed=4).digest()


def test_the_digest_sees_every_field() -> None:
    digests = set()
    for span in (
        ("a", "b", 0.0, 1.0),
        ("c", "b", 0.0, 1.0),
        ("a", "c", 0.0, 1.0),
        ("a", "b", 0.5, 1.0),
        ("a", "b", 0, 2),
    ):
        trace = Trace()
        trace.span(*span)
        digests.add(trace.digest())
    trace = Trace()
    trace.span("a", "b", 0.0, 1.0, rows=3)
    assert len(digests | {trace.digest()}) == 6


def test_a_full_trace_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    trace = Trace(max_spans=2)
    with caplog.at_level(logging.WARNING, "ebrl"):
        for number in range(5):
            trace.span("env", f"{number}", 0.0, 1.0)
    assert [span.name for span in trace.spans] == ["0", "1"]
    assert caplog.text.count("the trace is full") == 1


def test_the_file_is_chrome_trace_json(tmp_path: Path) -> None:
    trace = Trace()
    trace.span("env-0", "step", 1.0, 1.5, reward=2.0)
    trace.span("gen-0", "batch", 1.25, 1.75)
    trace.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"]: event["tid"] for event in events if event["ph"] == "M"}
    assert set(names) == {"env-0", "gen-0"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["name"], event["tid"], event["ts"], event["dur"]) for event in spans] == [
        ("step", names["env-0"], 1e6, 5e5),
        ("batch", names["gen-0"], 1.25e6, 5e5),
    ]
    assert spans[0]["args"] == {"reward": 2.0}


@pytest.mark.slow
@pytest.mark.blocks("environments are built before anything runs")
@pytest.mark.hogs("commands import what they use when it is used")
def test_every_move_of_the_tuner_is_in_the_metrics_of_a_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(tuner: Tuner, reading: Reading) -> Move | None:
        old = reading.cores[0].ceiling
        move = Move(reading.now_s, "machine", "concurrency", old, 1 if old > 1 else 2, f"turn {len(tuner.moves)}", 0.1)
        tuner.moves.append(move)
        return move

    monkeypatch.setattr(Tuner, "decide", decide)
    small = ["--updates", "6", "--ppo.batch-size", "256", "--ppo.minibatch-size", "64", "--trace"]
    assert main(["train", "--env", "CartPole-v1", *small, "--run-dir", str(tmp_path / "run")]) == 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    told = [(line["tuner/moves"], move) for line in lines for move in line.get("moves", [])]
    assert len(told) > 2
    assert [move.split()[-1] for _, move in told] == [str(number) for number in range(len(told))]
    assert all("machine.concurrency" in move for _, move in told)
    assert lines[-1]["tuner/moves"] == len(told), "every move is in one line"
    assert [line["tuner/concurrency"] for line in lines if "moves" in line] == [
        int(line["moves"][-1].split(":")[0].split()[-1]) for line in lines if "moves" in line
    ]
