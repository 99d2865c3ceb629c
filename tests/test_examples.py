"""The research recipes in scripts/examples, at reduced size: each checks its own claim, and here once more."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

TRAINED: dict[str, Any] = {}  # two recipes begin with the same training
EXAMPLES = Path(__file__).parents[1] / "scripts" / "examples"
RECIPES = sorted({path.stem for path in EXAMPLES.glob("*.py")} - {"ray_batch", "export_generate"})  # tested elsewhere


@pytest.fixture(autouse=True)
def as_a_user_runs_them(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """optax relies on the usual promotion of types."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    train = importlib.import_module("train_char_model")
    monkeypatch.setattr(train, "train", TRAINED.setdefault("train", functools.cache(train.train)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def run(name: str, options: str) -> Any:
    return importlib.import_module(name).main(options.split())


def test_policy_gradient_raises_the_reward() -> None:
    rewards = run("policy_gradient", "--steps 40 --batch 32")
    assert len(rewards) == 40
    assert np.mean(rewards[:4]) < 0.3 < 0.5 < np.mean(rewards[-4:])


def test_ensembles_by_vmap_are_the_mixture_and_the_product(capsys: pytest.CaptureFixture[str]) -> None:
    worst = run("ensemble", "--members 3 --tokens 5")
    assert set(worst) == {"mixture", "product"}
    assert max(worst.values()) < 1e-4
    assert "product of 3: log probabilities are those of the members" in capsys.readouterr().out


def test_sampling_gradients_agree_with_enumeration() -> None:
    found = run("sampling_gradients", "--rows 2000")
    assert found["score_function"] > 0.9
    assert 0.7 < found["relaxed"] < 1


def test_a_character_model_learns_its_page_and_writes_words_of_it() -> None:
    losses, text = run("train_char_model", "--steps 80 --width 16 --layers 1")
    assert losses[-1] < 0.7 * losses[0]
    page = importlib.import_module("train_char_model").TEXT.split()
    assert set(text.split()[1:-1]) & set(page)


def test_a_distilled_draft_is_accepted_more_often() -> None:
    found = run("distill_draft", "--teacher-steps 80 --steps 40 --width 16 --layers 1 --tokens 24")
    assert found["before"] + 0.1 < found["after"] <= 1


def test_every_recipe_is_run_documented_and_short() -> None:
    page = (EXAMPLES.parents[1] / "docs" / "recipes.md").read_text()
    own = Path(__file__).read_text()
    for name in RECIPES:
        lines = (EXAMPLES / f"{name}.py").read_text().count("\n")
        assert lines <= 125, name
        assert f"{name}.py" in page
        assert f'run("{name}"' in own
