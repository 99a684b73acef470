"""What adapters share, as far as it needs no simulator: ids, missing packages, GL, the form of observations."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any

import numpy as np
import pytest

from ebrl.core.errors import ConfigError
from ebrl.sim.adapters import ADAPTERS, choose_gl, has_adapter, require_gl
from ebrl.sim.envs.common import camera_names, global_numpy, image_key, observation_space, vector
from ebrl.sim.spec import env_spec, env_specs, observation_spec


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("no", name=package)

    monkeypatch.setattr(importlib, "import_module", missing)


@pytest.mark.parametrize(("first", "extra"), ADAPTERS.items())
def test_a_missing_simulator_names_the_command(monkeypatch: pytest.MonkeyPatch, first: str, extra: str) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    without(monkeypatch, "its_package")
    for describe in (env_spec, env_specs):
        with pytest.raises(ConfigError, match=rf"{first}/x needs its_package: pip install 'ebrl\[{extra}\]'"):
            describe(f"{first}/x")


@pytest.mark.parametrize("size", [0, -3, True, 1.5, "64"])
@pytest.mark.parametrize("first", ADAPTERS)
def test_a_picture_has_pixels(first: str, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"image_size must be a whole number of at least 1, got "):
        env_spec(f"{first}/task", image_size=size)


def test_ids_of_adapters() -> None:
    assert all(has_adapter(f"{first}/x") for first in ADAPTERS)
    assert not any(has_adapter(name) for name in ("LIBERO", "CartPole-v1", "libero/x", "phys2d/CartPole-v1", ""))


def test_gl_is_chosen_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: None)
    monkeypatch.setenv("MUJOCO_GL", "osmesa")
    choose_gl()
    assert os.environ["MUJOCO_GL"] == "osmesa"
    monkeypatch.delenv("MUJOCO_GL")
    choose_gl()
    assert os.environ["MUJOCO_GL"] == "egl"


def test_where_egl_is_missing_pictures_name_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    require_gl("x")
    monkeypatch.delenv("MUJOCO_GL")
    choose_gl()
    assert os.environ["MUJOCO_GL"] == "glx"
    with pytest.raises(ConfigError, match=r"x: pictures need EGL .*libegl1"):
        require_gl("x")


def test_the_form_of_observations() -> None:
    form = observation_spec(observation_space(5, ("front", "hand"), 8), "x")
    assert isinstance(form, dict)
    assert {key: (part.shape, part.dtype) for key, part in form.items()} == {
        "state": ((5,), "float32"),
        "images/front": ((8, 8, 3), "uint8"),
        "images/hand": ((8, 8, 3), "uint8"),
    }
    assert image_key("front") == "images/front"
    found = vector([np.arange(2.0), np.float32(7), np.ones((1, 2))])
    assert found.dtype == np.float32
    assert found.tolist() == [0, 1, 7, 1, 1]


def test_cameras_are_one_name_or_several() -> None:
    assert camera_names("a", ("a", "b"), "x") == ("a",)
    assert camera_names(["b", "a"], ("a", "b"), "x") == ("b", "a")
    assert camera_names((), ("a",), "x") == ()
    with pytest.raises(ConfigError, match="x has no camera 'c'; there are a, b"):
        camera_names(("a", "c"), ("b", "a"), "x")


def test_the_global_generator_is_lent_and_put_back() -> None:
    before = str(np.random.get_state(legacy=False))
    drawn = []
    for seed in (7, 7, 2**40):
        with global_numpy(seed):
            drawn.append(np.random.uniform(size=3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ZeroDivisionError), global_numpy(1):
        raise ZeroDivisionError
    assert str(np.random.get_state(legacy=False)) == before
