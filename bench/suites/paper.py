"""Sixteen pairs of a simulator and a policy on three machines, each scheduler at its own best setting.

Compared is environment steps per second, updates included, after the first eight updates. EBRL has no setting: it
finds its own in these, since a change of it is judged by updates, of which a training run has hundreds. Settings of all
others are searched with short runs, and the best of each family runs again at full length. A run that trains while it
rolls out needs two updates until the slower of both sets the pace, however short it is. "RLinf's best mode"
is the best of ``lockstep``, ``pipeline:k`` and ``async-train:k,share``; RL-VLA3 is ``size-timeout``, and its batcher
without the barrier at the end of a rollout, which its code has, is ``size-timeout-free``. Where the assumed numbers of
a profile decide and not the scheduler, the ranges of the sensitivity part say so: every assumed number is halved and
doubled there, on the H200, and the two fastest of RLinf keep the setting that was best before. Where an update takes
most of a cycle no scheduler of rollouts can win much; the rollouts alone are compared too, for information.

The division of the GPU that EBRL's tuner and RLinf's asynchronous mode use is the model's; no backend divides a real
GPU yet.

Calibration: RLinf's asynchronous over its synchronous mode (published: 1.11 to 1.38), RL-VLA3 over synchronous (up to
1.85), VER over synchronous (up to 2.5). And a batched simulator that is split into small units must lose.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from statistics import geometric_mean
from typing import TypeAlias

from bench import baselines
from bench.report import Check, at_least, at_most
from bench.runs import Job, Outcome, load, run_all
from bench.suites import Ask, Result
from bench.workload import Workload, bound, limits, pairs

MACHINES = ("h200", "a100", "rtx4090")
RLINF = ("lockstep", "pipeline", "async-train")
RLVLA3 = ("size-timeout", "size-timeout-free")
OTHERS = ("ver", "ver-overlap", "wait-num", "tianshou")
FACTORS = (0.5, 2.0)
SEARCH, FULL, VARIED = (2, 2), (8, 4), (2, 2)  # updates that are dropped, and that count
FOUND = (8, 2)  # of EBRL beside those that are varied
BARRIER = (
    "lockstep",
    "pipeline",
    "ver",
    "wait-num",
    "tianshou",
)  # train between rollouts: every cycle is like the next
SEARCH_BARRIER = (1, 1)
Case: TypeAlias = tuple[str, str, str]
Found: TypeAlias = dict[Case, dict[str, Outcome]]
FREE = 1e6  # times faster than it is
SLOTS = (160, 40, 10)  # of a unit of the batched simulator, when it is split


def suite(ask: Ask) -> Result:
    """Compare everywhere, then vary what is assumed."""
    everything: list[Case] = [(simulator, policy, name) for name in MACHINES for simulator, policy in pairs()]
    cases = [case for case in everything if not ask.smoke or case == ("libero", "pi05", "h200")]
    searched = run_all(
        job_of(case, setting, SEARCH_BARRIER if ask.smoke or family in BARRIER else SEARCH, ask.seed)
        for case in cases
        for family in (RLINF[:1] if ask.smoke else families_of(case))
        for setting in baselines.settings(family, load(job_of(case, "ebrl", FULL, 0)))
    )
    best = {case: pick(o for o in searched if o.job.workload[1:] == case) for case in cases}
    lengths = (1, 1) if ask.smoke else FULL
    final = run_all(
        job_of(case, scheduler, lengths, ask.seed)
        for case in cases
        for scheduler in ("ebrl", "greedy", *best[case].values())
    )
    found = {case: {family_of(o): o for o in final if o.job.workload[1:] == case} for case in cases}
    ratios = {case: ratio(found[case], RLINF) for case in cases}
    lines = [line(outcomes) for outcomes in found.values()] + summary(found)
    checks, data = verdict(found, ratios)
    if not ask.smoke:
        more, varied, text = sensitivity(found, ask.seed)
        checks += more
        alone, rollouts = without_training(found, ask.seed)
        lines += text + rollouts + calibration(found)
        split, text = splitting(ask.seed)
        checks.append(split)
        lines += text
        data |= {"varied": varied, "rollouts alone": alone}
    bars = [
        ("+".join(case[:2]), {name: o.speed / found[case]["ebrl"].speed for name, o in found[case].items()})
        for case in cases
        if case[2] == "h200"
    ]
    return Result(checks, data, lines, bars, "rate, as a part of EBRL's")


def families_of(case: Case) -> tuple[str, ...]:
    """Return what is searched; those that no bar is about on one machine only."""
    return (*RLINF, *RLVLA3, *OTHERS) if case[2] == MACHINES[0] else (*RLINF, RLVLA3[0])


def job_of(
    case: Case, scheduler: str, updates: tuple[int, int], seed: int, changes: dict[str, float] | None = None
) -> Job:
    """Return a run over a number of updates."""
    job = Job(("pair", *case), scheduler, changes or {}, seed=seed)
    workload = load(job)
    steps = workload.batch_size * workload.policy.chunk
    return Job(("pair", *case), scheduler, changes or {}, drop=updates[0] * steps, count=updates[1] * steps, seed=seed)


def family_of(outcome: Outcome) -> str:
    """Return the name of a scheduler without its setting."""
    return outcome.job.scheduler.split(":")[0]


def pick(outcomes: Iterable[Outcome]) -> dict[str, str]:
    """Return the best setting of every family."""
    best: dict[str, Outcome] = {}
    for outcome in outcomes:
        family = family_of(outcome)
        if family not in best or outcome.speed > best[family].speed:
            best[family] = outcome
    return {family: outcome.job.scheduler for family, outcome in best.items()}


def ratio(found: dict[str, Outcome], families: Iterable[str]) -> float:
    """Return how many times faster EBRL is than the fastest of some families."""
    return found["ebrl"].speed / max(found[family].speed for family in families if family in found)


def attainable(workload: Workload) -> bool:
    """Whether the rollout bound is below what generation and training leave each other when they take turns."""
    train_s = workload.update_s() / max(workload.batch_size, 1)
    rows = workload.simulator.num_envs
    device = workload.policy.chunk / (workload.generation_s(rows) / rows + train_s)
    if workload.simulator.kind == "gpu-batched":
        device = 0.0  # the simulator needs the device too
    return bound(workload) < device


def verdict(found: Found, ratios: dict[Case, float]) -> tuple[list[Check], dict[str, object]]:
    """Return the bars of the comparison."""
    values = list(ratios.values())
    checks = [
        at_least("geometric mean: ebrl / RLinf's best mode", geometric_mean(values), 1.5),
        at_least("lowest: ebrl / RLinf's best mode", min(values), 1.0),
    ]
    theirs = [ratio(outcomes, RLVLA3[:1]) for outcomes in found.values() if RLVLA3[0] in outcomes]
    if theirs:
        checks.append(at_least("lowest: ebrl / RL-VLA3", min(theirs), 1.0))
    for outcomes in found.values():
        workload = load(outcomes["ebrl"].job)
        if attainable(workload):
            part = outcomes["ebrl"].speed / bound(workload)
            checks.append(at_least(f"{workload.name}: part of the bound, attainable", part, 0.9))
    data: dict[str, object] = {
        "+".join(case): {outcome.job.scheduler: outcome.speed for outcome in outcomes.values()}
        for case, outcomes in found.items()
    }
    return checks, data


def summary(found: Found) -> list[str]:
    """Return lowest, mean and highest ratio to the others, over all pairs and machines."""
    lines = []
    for label, families in (
        ("RLinf's best mode", RLINF),
        ("RL-VLA3", RLVLA3[:1]),
        ("RL-VLA3 without its barrier", RLVLA3[1:]),
        ("VER", OTHERS[:2]),
        ("EnvPool and tianshou", OTHERS[2:]),
        ("EBRL, greedy", ("greedy",)),
    ):
        values = [ratio(outcomes, families) for outcomes in found.values() if families[0] in outcomes]
        if values:
            lines.append(f"ebrl / {label}: {spread(values)}")
    return lines


def spread(values: Collection[float]) -> str:
    """Return lowest, mean and highest ratio as text."""
    return f"{min(values):.2f} .. {geometric_mean(values):.2f} (geometric mean) .. {max(values):.2f}"


def line(found: dict[str, Outcome]) -> str:
    """Return a row of the table."""
    workload = load(found["ebrl"].job)
    limit = limits(workload)
    causes = f"sim {limit.simulation:.0f} gen {limit.generation:.0f} train {limit.training:.0f}"
    others = "  ".join(f"{o.job.scheduler} {o.speed:.1f}" for name, o in found.items() if name != "ebrl")
    return (
        f"{workload.name:28} ({causes}/s)  ebrl {found['ebrl'].speed:.1f}/s  {others}  "
        f"-> {ratio(found, RLINF):.2f} x RLinf's best mode"
    )


def sensitivity(found: Found, seed: int) -> tuple[list[Check], dict[str, list[float]], list[str]]:
    """Halve and double every assumed number on the H200."""
    cases = [case for case in found if case[2] == "h200"]
    keys, jobs = [], []
    for case in cases:
        ranked = sorted((found[case][family] for family in RLINF), key=lambda outcome: -outcome.speed)
        rivals = [outcome.job.scheduler for outcome in ranked[:2]]
        for path in load(job_of(case, "ebrl", VARIED, seed)).assumed():
            for factor in FACTORS:
                keys.append((case, path, factor, len(rivals) + 1))
                jobs.append(job_of(case, "ebrl", FOUND, seed, {path: factor}))
                jobs += [job_of(case, name, VARIED, seed, {path: factor}) for name in rivals]
    outcomes = iter(run_all(jobs))
    varied: dict[str, list[float]] = {}
    worst: list[tuple[float, str]] = []
    for case, path, factor, num in keys:
        ours, *rivals_ = [next(outcomes) for _ in range(num)]
        value = ours.speed / max(outcome.speed for outcome in rivals_)
        varied.setdefault("+".join(case[:2]), []).append(value)
        worst.append((value, f"{'+'.join(case[:2])} {path} x{factor:g}"))
    values = [value for value, _ in worst]
    good = sum(value >= 1.0 for value in values) / len(values)
    lines = [f"varied {name:24} {min(v):.2f} .. {max(v):.2f} x RLinf's best mode" for name, v in varied.items()]
    lines += [f"    lowest: {value:.3f}  {what}" for value, what in sorted(worst)[:5]]
    return [at_least("variations of assumed numbers with no less than RLinf's best mode", good, 0.95)], varied, lines


def without_training(found: Found, seed: int) -> tuple[dict[str, float], list[str]]:
    """Compare the rollouts alone on the H200: updates cost nothing, so what is left is what the scheduler decides.

    RLinf runs at the settings that were best with training, and at every number of stages.
    """
    free = {"training.samples_per_s": FREE}
    cases = [case for case in found if case[2] == "h200"]
    jobs = []
    for case in cases:
        best = (found[case][family].job.scheduler for family in RLINF if family != "pipeline")
        rivals = [*best, *baselines.settings("pipeline", load(job_of(case, "ebrl", VARIED, seed)))]
        jobs += [job_of(case, "ebrl", FOUND, seed, free), *(job_of(case, name, VARIED, seed, free) for name in rivals)]
    outcomes = run_all(jobs)
    ratios = {}
    for case in cases:
        speeds = [(o.job.scheduler == "ebrl", o.speed) for o in outcomes if o.job.workload[1:] == case]
        theirs = max(speed for ours, speed in speeds if not ours)
        ratios["+".join(case[:2])] = next(speed for ours, speed in speeds if ours) / theirs
    text = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
    return ratios, [
        f"rollouts alone (updates that cost nothing): ebrl / RLinf's best mode: {spread(ratios.values())}",
        f"    {text}",
    ]


def calibration(found: Found) -> list[str]:
    """Return the baselines' ratios to synchronous training, beside what was published."""
    lines = []
    for label, families, published in (
        ("RLinf asynchronous / synchronous", ("async-train",), "1.11 to 1.38"),
        ("RL-VLA3 / synchronous", ("size-timeout",), "up to 1.85"),
        ("VER / synchronous", ("ver", "ver-overlap"), "up to 2.5"),
    ):
        values = []
        for outcomes in found.values():
            if families[0] in outcomes:
                sync = max(outcomes[name].speed for name in ("lockstep", "pipeline"))
                values.append(max(outcomes[name].speed for name in families) / sync)
        lines.append(f"calibration: {label}: {min(values):.2f} .. {max(values):.2f} (published: {published})")
    return lines


def splitting(seed: int) -> tuple[Check, list[str]]:
    """Split the batched simulator; the published result is that it loses."""
    case, whole = ("maniskill", "pi05", "h200"), SLOTS[0]
    jobs = [
        job_of(case, "size-timeout-free:320,0.02", VARIED, seed, {"simulator.slots_per_unit": slots / whole})
        for slots in SLOTS
    ]
    speeds = [outcome.speed for outcome in run_all(jobs)]
    text = ", ".join(f"{slots} slots a unit {speed:.1f}/s" for slots, speed in zip(SLOTS, speeds, strict=True))
    return at_most("a batched simulator that is split / whole", speeds[-1] / speeds[0], 1.0), [f"ManiSkill: {text}"]
