"""What `bench.gates` counts, asks for and compares; that it runs `tests/test_bench.py` shows."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
from typing import Any

import numpy as np
import pytest
import torch

from bench import gates
from bench.gates import Curve, Job, Outcome, jobs_of, judge
from bench.report import interquartile_mean, interval
from bench.sb3 import Finished, Reference, Task
from bench.tasks import GATES, SMOKE, slides, zoo_cartpole
from ebrl import PPOConfig, env_spec


def outcome(seed: int, score: float, **changes: Any) -> Outcome:
    numbers = {"area": score, "decisions_to_score": 1000, "lag_mean": 0.5, "lag_max": 0, "masked": 0.0, "cpu_s": 1.0}
    return Outcome(seed=seed, score=score, **{"task_scores": {"": score}, **numbers, **changes})


def asked(**flags: bool) -> argparse.Namespace:
    return argparse.Namespace(**{"smoke": False, "full": False, "seed": 7, "only": None, "keep": None} | flags)


def test_an_interquartile_mean_leaves_out_a_quarter_on_each_side() -> None:
    assert interquartile_mean([100.0, 2.0, 3.0, 4.0, -100.0]) == 3.0
    assert interquartile_mean([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 100.0]) == 3.5
    assert interquartile_mean([1.0, 3.0]) == 2.0


def test_an_interval_is_about_as_wide_as_that_of_a_mean() -> None:
    values = np.random.default_rng(0).normal(10.0, 2.0, 100).tolist()
    found = interval(np.mean, values, seed=1)
    assert found.value == pytest.approx(statistics.fmean(values))
    assert found.low == pytest.approx(found.value - 1.96 * 0.2, abs=0.1)
    assert found.high == pytest.approx(found.value + 1.96 * 0.2, abs=0.1)


def test_a_curve_is_the_mean_of_the_latest_episodes() -> None:
    curve = Curve(GATES["cartpole"])
    curve.add(256, [])
    assert (curve.area, curve.reached) == (0.0, None)
    curve.add(512, [Finished(400.0, None), Finished(500.0, None)])
    curve.add(768, [Finished(500.0, None)] * 20)
    assert (curve.area, curve.reached) == (475.0, 768)
    lucky = Curve(GATES["cartpole"])
    lucky.add(256, [Finished(500.0, None)] * 19)
    assert (lucky.area, lucky.reached) == (500.0, None)


def test_a_curve_of_successes_counts_them() -> None:
    curve = Curve(SMOKE["push"])
    curve.add(1024, [Finished(-5.0, False), Finished(-5.0, None)])
    curve.add(2048, [Finished(-5.0, True)] * 98)
    curve.add(3072, [Finished(-5.0, False)] * 2)
    assert (curve.area, curve.reached) == pytest.approx(((0.0 + 0.98 + 0.98) / 3, 2048))


def test_areas_and_scores_of_five_seeds() -> None:
    jobs = jobs_of("cartpole", asked())
    assert [(job.max_lag, job.seed) for job in jobs] == [(lag, seed) for lag in (0, 1, 2) for seed in range(7, 12)]
    scores = {0: [500.0] * 5, 1: [500.0, 475.0, 500.0, 0.0, 0.0], 2: [500.0, 474.0, 500.0, 500.0, 500.0]}
    runs = [(job, outcome(job.seed, scores[job.max_lag or 0][job.seed - 7], lag_mean=0.9, lag_max=1)) for job in jobs]
    checks, data = judge(GATES["cartpole"], runs)
    assert {check.name: (check.value, check.ok) for check in checks} == {
        "cartpole max_lag 0: lowest score of 5": (500.0, True),
        "cartpole max_lag 0: highest lag": (1.0, False),
        "cartpole max_lag 1: lowest score of 5": (0.0, False),
        "cartpole max_lag 1: lowest mean lag": (0.9, True),
        "cartpole max_lag 1: highest lag": (1.0, True),
        "cartpole max_lag 1: area over that at lag 0, 5 seeds": (0.59, False),
        "cartpole max_lag 2: lowest score of 5": (474.0, False),
        "cartpole max_lag 2: lowest mean lag": (0.9, False),
        "cartpole max_lag 2: highest lag": (1.0, True),
        "cartpole max_lag 2: area over that at lag 0, 5 seeds": (pytest.approx(0.9896), True),
    }
    assert data["cartpole max_lag 1"]["score_iqm"]["value"] == pytest.approx(325.0)


def test_with_full_stable_baselines3_has_the_same_seeds_and_no_bars(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = jobs_of("pendulum", asked(full=True))
    assert [job.seed for job in jobs if job.max_lag is None] == [7, 8, 9, 10, 11]
    assert len(jobs) == 20
    runs = [
        (job, outcome(job.seed, 900.0))
        if job.max_lag is None
        else (job, outcome(job.seed, 1000.0, lag_mean=job.max_lag, lag_max=job.max_lag))
        for job in jobs
    ]
    checks, data = judge(GATES["pendulum"], runs)
    assert not any("Stable" in check.name for check in checks)
    assert all(check.ok for check in checks)
    assert "pendulum Stable-Baselines3: greedy return 900" in capsys.readouterr().out
    assert data["pendulum Stable-Baselines3"]["score_iqm"] == {"value": 900.0, "low": 900.0, "high": 900.0}
    assert len(jobs_of("pendulum", asked())) == 9


def test_several_tasks_have_a_rate_each(capsys: pytest.CaptureFixture[str]) -> None:
    (job,) = jobs_of("mt10", asked(full=True))
    checks, _ = judge(GATES["mt10"], [(job, outcome(7, 0.5, task_scores={"reach-v3": 1.0, "push-v3": 0.0}))])
    assert [check.name for check in checks] == ["mt10 max_lag 1: highest lag"]
    assert capsys.readouterr().out.splitlines()[1:] == ["  reach-v3: 1 [1 .. 1]", "  push-v3: 0 [0 .. 0]"]


def test_without_stable_baselines3_one_line_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["gates", "--full", "--smoke"])
    assert gates.main() == 2
    assert capsys.readouterr() == (
        "",
        "error: stable_baselines3, which EBRL is compared with, is not installed: pip install 'ebrl[bench]'\n",
    )


def test_the_task_of_stable_baselines3_is_that_of_the_spec() -> None:
    finished: list[Finished] = []
    spec = env_spec(slides()[1].make, horizon=5, action_repeat=2)
    task = Task(spec.make(), spec, 0.1, finished)
    task.reset(seed=0)
    obs, reward, terminated, truncated, _ = task.step(np.array([1.0]))
    assert obs.dtype == np.float32
    assert (terminated, truncated) == (False, False)
    total = reward
    for _ in range(2):
        _, reward, terminated, truncated, _ = task.step(np.array([1.0]))
        total += reward
    assert (terminated, truncated) == (False, True)  # five steps, of which the last decision had one
    (episode,) = finished
    assert episode.total_reward == pytest.approx(10 * total)
    assert episode.success


@pytest.mark.slow
@pytest.mark.parametrize("normalize", [False, True])
def test_what_stable_baselines3_learned_acts_here_as_it_does_there(normalize: bool) -> None:
    pytest.importorskip("stable_baselines3")
    config = PPOConfig(batch_size=64, minibatch_size=32, epochs=2, reward_scale=0.1)
    model = Reference(slides()[0], config, num_envs=2, normalize_obs=normalize, seed=0)
    updates: list[int] = []
    model.learn(3, updates.append)
    assert updates == [1, 2, 3]
    assert len(model.finished) == 8  # 192 decisions in episodes of 20, in two environments
    obs = np.random.default_rng(0).uniform(-1, 1, (6, 2)).astype(np.float32)
    seen = model._envs.normalize_obs(obs) if normalize else obs
    theirs, _ = model._model.predict(seen, deterministic=True)
    ours = model.policy().act({"state": torch.from_numpy(obs)}, torch.zeros(6, 1), deterministic=True)
    np.testing.assert_allclose(ours.action[:, 0].detach().numpy(), theirs, rtol=1e-4, atol=1e-6)
    model.close()


@pytest.mark.slow
def test_the_settings_of_the_zoo_are_those_of_stable_baselines3() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3 import PPO

    model = Reference(env_spec("CartPole-v1"), zoo_cartpole(390, 0), num_envs=8, normalize_obs=False, seed=0)._model
    defaults = PPO("MlpPolicy", "CartPole-v1", device="cpu")
    assert (model.n_steps, model.batch_size, model.n_epochs, model.gae_lambda, model.gamma) == (32, 256, 20, 0.8, 0.98)
    assert [model.lr_schedule(left) for left in (1.0, 0.5)] == [1e-3, 5e-4]
    assert callable(model.clip_range)
    assert [model.clip_range(left) for left in (1.0, 0.5)] == [0.2, 0.1]
    assert (model.vf_coef, model.ent_coef, model.max_grad_norm) == (
        defaults.vf_coef,
        defaults.ent_coef,
        defaults.max_grad_norm,
    )
    assert model.policy.optimizer.defaults["eps"] == zoo_cartpole(390, 0).adam_eps


def test_a_job_says_what_it_runs() -> None:
    assert Job("push", None, 0, smoke=True).system == "Stable-Baselines3"
    assert Job("push", 1, 0, smoke=True).task is SMOKE["push"]
    assert Job("push", 1, 0, smoke=False).task is GATES["push"]
