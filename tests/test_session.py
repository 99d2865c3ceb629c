"""A session: replies from a kept cache are those from scratch, whatever was said, cut, edited or broken off before."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxdecode as jd
from jaxdecode import kvcache
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.session import Session, Steps, capacity_class, common_prefix, rolled_back
from jaxdecode.testing import count_compilations

V, CONTEXT, N = 61, 1024, 12
CONFIG = TransformerConfig(
    vocab_size=V, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_mlp=48, context_length=CONTEXT
)
MODEL = transformer(CONFIG)
PARAMS = init_params(CONFIG, jax.random.key(0))
TOY = jd.load("toy")
WARM = {"temperature": 0.9, "top_p": 0.95}
COLD = {"temperature": 0.0, "top_p": 0.95}  # the same programs as WARM


def ids(seed: int, n: int, vocab: int = V) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def drain(steps: Steps, most: int | None = None) -> list[int]:
    """Tokens of the steps, of which at most ``most`` are taken."""
    return [int(info.tokens[0, 0]) for info in itertools.islice(steps, most)]


def scratch(prompt: list[int], key: Any, **options: Any) -> jd.Generated:
    """``generate`` for the prompt alone, padded to one of two sizes, so that few programs are compiled."""
    size = 256 if len(prompt) <= 256 else CONTEXT - N
    tokens, chosen = np.array([prompt + [0] * (size - len(prompt))]), jd.Settings(max_new_tokens=N, **options)
    return jd.generate(MODEL, PARAMS, tokens, lengths=[len(prompt)], key=key, settings=chosen)


@pytest.fixture
def session() -> Session:
    return Session(MODEL, PARAMS, context=CONTEXT)


def test_turns_equal_scratch_and_reuse_what_they_can(session: Session) -> None:
    key, text = jax.random.key(3), ids(0, 40)
    for turn, options in enumerate([COLD, WARM, COLD, WARM]):
        steps = session.reply(text, key=key, settings=jd.Settings(max_new_tokens=N, **options))
        assert session.reused == (0 if turn == 0 else len(text) - 1 - 7)
        new, out = drain(steps), scratch(text, key, **options)
        assert new == out.to_lists()[0]
        mine = steps.result()
        np.testing.assert_allclose(mine.logprob[0, :N], out.logprob[0], atol=1e-5)
        assert (int(mine.length[0]), int(mine.finish[0])) == (N, jd.Finish.LENGTH)
        assert session.tokens == text + new[:-1]
        text = [*text, *new, *ids(turn, 7)]


def test_S7_4_an_edit_keeps_the_prefix_and_nothing_after_it(session: Session) -> None:
    chosen = jd.Settings(max_new_tokens=N, **COLD)
    old = ids(1, 150)
    drain(session.reply(old, settings=chosen))
    for cut in (149, 100, 37, 0):
        edited = [*old[:cut], (old[cut] + 1) % V, *ids(cut, 30)]
        new = drain(session.reply(edited, settings=chosen))
        assert session.reused == cut
        assert new == scratch(edited, None, **COLD).to_lists()[0]
        drain(session.reply(old, settings=chosen))


def test_the_same_prompt_again_needs_only_its_last_token(session: Session) -> None:
    prompt, key = ids(2, 50), jax.random.key(1)
    first = drain(session.reply(prompt, key=key, settings=jd.Settings(max_new_tokens=N, **WARM)))
    again = drain(session.reply(prompt, key=key, settings=jd.Settings(max_new_tokens=N, **WARM)))
    assert (again, session.reused) == (first, 49)


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_reply_broken_off_is_kept_as_far_as_it_got(session: Session, taken: int) -> None:
    chosen, prompt = jd.Settings(max_new_tokens=N, **COLD), ids(4, 20)
    steps = session.reply(prompt, settings=chosen)
    part = drain(steps, taken)
    assert steps.result().to_lists() == [part]
    assert int(steps.result().finish[0]) == jd.Finish.RUNNING
    assert session.tokens == [*prompt, *part][:-1]
    text = [*prompt, *part, *ids(5, 6)]
    new = drain(session.reply(text, settings=chosen))
    assert session.reused == len(prompt) + taken - 1
    assert new == scratch(text, None, **COLD).to_lists()[0]


def test_a_step_torn_by_an_exception_costs_the_cache_and_nothing_else(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, prompt = jd.Settings(max_new_tokens=N, **COLD), ids(6, 20)
    steps = session.reply(prompt, settings=chosen)
    next(steps)

    def torn(*arguments: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("jaxdecode.session._step", torn)
        with pytest.raises(KeyboardInterrupt):
            next(steps)
    assert list(steps) == []
    with pytest.raises(ValueError, match="result: expected a state"):
        steps.result()
    assert session.tokens == []
    assert drain(session.reply(prompt, settings=chosen)) == scratch(prompt, None, **COLD).to_lists()[0]


def test_growing_classes_equal_scratch(session: Session) -> None:
    chosen, text, sizes = jd.Settings(max_new_tokens=N, **COLD), ids(7, 400), []
    for n in (0, 60, 300):
        text = [*text, *ids(n, n)]
        new = drain(session.reply(text, settings=chosen))
        sizes.append(session.capacity)
        assert new == scratch(text, None, **COLD).to_lists()[0]
        text = [*text, *new]
    assert sizes == [512, 1024, 1024]
    assert session.reused == 400 + 60 + 2 * N - 1


def test_the_last_room_of_the_context(session: Session) -> None:
    chosen = jd.Settings(max_new_tokens=N, **COLD)
    prompt = ids(8, CONTEXT - 3)
    steps = session.reply(prompt, settings=chosen)
    assert len(drain(steps)) == 3
    assert int(steps.result().finish[0]) == jd.Finish.LENGTH
    for bad in ([], ids(8, CONTEXT)):
        with pytest.raises(ValueError, match=r"prompt: expected 1 to 1023 tokens .* got (0|1024)"):
            session.reply(bad, settings=chosen)


def test_turns_compile_nothing_new(session: Session) -> None:
    key, text = jax.random.key(0), ids(9, 20)
    for n in (40, 150):  # a short and a long message: both widths
        text = [*text, *drain(session.reply(text, key=key, settings=jd.Settings(max_new_tokens=N, **WARM))), *ids(n, n)]
    drain(session.reply([*text, 1], key=key, settings=jd.Settings(max_new_tokens=N, **WARM)))
    with count_compilations() as count:
        for turn in range(3):
            chosen = jd.Settings(max_new_tokens=N + turn, temperature=0.5 + turn, top_p=0.9)
            text = [*text, *drain(session.reply(text, key=key, settings=chosen)), *ids(turn, 9 + 11 * turn)]
    assert int(count) == 0


def test_eos_and_nan_between_turns(session: Session) -> None:
    prompt = ids(10, 15)
    free = scratch(prompt, None, **COLD).to_lists()[0]
    end = next(t for t in free[2:] if t not in free[:2])
    chosen = jd.Settings(max_new_tokens=N, **COLD, eos=[end])
    steps = session.reply(prompt, settings=chosen)
    new = drain(steps)
    assert new == free[: free.index(end) + 1]
    assert int(steps.result().finish[0]) == jd.Finish.EOS
    good = session.params
    session.params = jax.tree.map(lambda x: x * jnp.asarray(jnp.nan, x.dtype), good)
    broken = session.reply([*prompt, *new], settings=chosen)
    assert drain(broken) == [-1]
    assert int(broken.result().finish[0]) == jd.Finish.NAN
    assert session.tokens == []  # nothing that a broken step has touched is used again
    session.params = good
    text = [*prompt, *new, 3]
    assert (
        drain(session.reply(text, settings=jd.Settings(max_new_tokens=N, **COLD)))
        == (scratch(text, None, **COLD).to_lists()[0])
    )


def test_a_model_whose_cache_cannot_be_cut_goes_on_or_starts_anew() -> None:
    session = Session(TOY.model, TOY.params, context=TOY.config.context_length)
    key, chosen = jax.random.key(5), TOY.settings(max_new_tokens=N, temperature=1.0)
    first = TOY.tokenizer.encode("hello ")
    reply = drain(session.reply(first, key=key, settings=chosen))
    longer = [*first, *reply, *TOY.tokenizer.encode("two")]
    for text, reused in ((longer, len(session.tokens)), (longer[:4], 0)):
        new = drain(session.reply(text, key=key, settings=chosen))
        assert session.reused == reused
        assert new == jd.generate(TOY.model, TOY.params, [text], key=key, settings=chosen).to_lists()[0]


@pytest.mark.parametrize(
    ("prompt", "options", "about"),
    [
        ([1, V], {"temperature": 0.0}, "prompt"),
        ([-1], {"temperature": 0.0}, "prompt"),
        ([1], {"temperature": 1.0}, "key"),
        ([1], {"temperature": [0.0, 0.0]}, "1 rows"),
        ([1], {"temperature": 0.0, "eos": [V]}, "eos"),
    ],
)
def test_bad_input_is_refused_and_leaves_the_session_as_it_was(
    session: Session, prompt: list[int], options: dict[str, Any], about: str
) -> None:
    drain(session.reply([1, 2, 3], settings=jd.Settings(max_new_tokens=2, **COLD)))
    before = session.tokens
    with pytest.raises(ValueError, match=about):
        session.reply(prompt, settings=jd.Settings(max_new_tokens=N, **options))
    assert session.tokens == before


def test_rolled_back_cuts_kv_nodes_and_nothing_else() -> None:
    cache = MODEL.apply(PARAMS, jnp.array([[1, 2, 3]]), MODEL.init_cache(PARAMS, 1, 8))[1]
    cut = rolled_back(cache, 3, 2)
    assert isinstance(cut, kvcache.KVCache)
    assert cut.length.tolist() == [2]
    other = TOY.model.init_cache(TOY.params, 1, 8)
    assert rolled_back(other, 3, 3) is other
    assert rolled_back(other, 3, 2) is None


texts = st.lists(st.integers(0, 2), max_size=8)


@given(texts, texts)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_common_prefix_is_the_longest(a: list[int], b: list[int]) -> None:
    n = common_prefix(a, b)
    assert a[:n] == b[:n]
    assert n == min(len(a), len(b)) or a[n] != b[n]


@given(st.integers(1, 10**6), st.integers(1, 10**6))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_capacity_class_holds_what_is_needed_in_few_sizes(need: int, most: int) -> None:
    size = capacity_class(need, most)
    assert min(need, most) <= size <= most
    assert size == most or (size % 512 == 0 and (size // 512).bit_count() == 1 and (size == 512 or size < 2 * need))
