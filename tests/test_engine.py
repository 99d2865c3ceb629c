"""The engine: rows in slots, whatever comes and goes around them, are what ``generate`` writes for them alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxdecode import Finish, Generated, Settings, generate, kvcache
from jaxdecode.engine import Engine, Options, Request, Result, Turn
from jaxdecode.keys import row_keys
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.testing import count_compilations, markov_model, second_order_model

V, B, N, LONGEST = 7, 48, 24, 80
RANDOM = np.random.default_rng(11)
MODEL = second_order_model()
TABLE = (RANDOM.normal(size=(V, V, V)) * 3).round().astype(np.float32) / 2  # halves: ties happen
SEED = jax.random.key(5)
IDS = [f"line {i}" for i in range(B)]
KEYS = row_keys(SEED, B, IDS)


def batch(seed: int = 1) -> tuple[list[list[int]], dict[str, Any], Any, Any]:
    """Prompts, numbers, end ids and stops of B rows that differ in all of them."""
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, V, n).tolist() for n in random.integers(1, LONGEST, B)]
    numbers: dict[str, Any] = {
        "max_new_tokens": np.r_[N, random.integers(0, N + 1, B - 1)],
        "temperature": random.choice([0.0, 0.5, 1.0, 3.0], B),
        "repetition_penalty": random.choice([1.0, 1.3], B),
    }
    return prompts, numbers, random.integers(-1, V, (B, 2)), random.integers(0, V, (B, 1, 2)).tolist()


PROMPTS, NUMBERS, EOS, STOP = batch()


def settings(row: int, **more: Any) -> Settings:
    numbers = {name: x[row].item() for name, x in NUMBERS.items()}
    return Settings(**numbers, eos=EOS[row].tolist(), stop=STOP[row], **more)


def requests(rows: Any = range(B)) -> list[Request]:
    return [Request(IDS[i], PROMPTS[i], settings(i), KEYS[i]) for i in rows]


@pytest.fixture(scope="module")
def expected() -> Generated:
    out = generate(MODEL, TABLE, PROMPTS, key=KEYS, settings=Settings(**NUMBERS, eos=EOS, stop=STOP))
    return jax.tree.map(np.asarray, out)


def assert_same(result: Result, expected: Generated, row: int) -> None:
    """Every token and reason; every number up to the last bits. The engine's record may be longer."""
    assert result.error is None
    assert result.out is not None
    n = int(expected.length[row])
    for field in dataclasses.fields(Generated):
        one, other = getattr(result.out, field.name), getattr(expected, field.name)
        assert (one is None) == (other is None)
        if one is not None:
            one, other = one[0], other[row]
            one, other = (x[:n] if x.ndim else x for x in (one, other))
            exact = np.issubdtype(one.dtype, np.integer)
            np.testing.assert_allclose(one, other, 0 if exact else 1e-4, 0 if exact else 1e-6, err_msg=field.name)
    assert set(result.out.tokens[0, n:].tolist()) <= {-1}


ENGINES: dict[tuple[int, int, int], Engine] = {}


def engine(slots: int, staged: int, chunk: int, **more: Any) -> Engine:
    """One of few plans, with any numbers that are not part of a program."""
    made = ENGINES.setdefault((slots, staged, chunk), Engine(MODEL, TABLE))
    made.options = Options(slots=slots, staged=staged, chunk=chunk, **more)
    return made


def test_all_programs_are_compiled_at_the_start(expected: Generated) -> None:
    turns: list[int] = []
    with count_compilations() as compiled:
        options = Options(slots=1, staged=1, chunk=30)
        made = Engine(MODEL, TABLE, options=options, on_turn=lambda turn: turns.append(int(compiled)))
        results = [*made.serve(requests())]
    assert len(results) == B
    assert turns[0] == turns[-1] == int(compiled)
    assert int(compiled) <= 10  # eight, and a key
    with count_compilations() as compiled:  # other numbers, another engine, a program that is there
        other = Engine(MODEL, TABLE, options=options._replace(steps=3, passes=1, refill=1.0))
        assert len([*other.serve(requests(range(10)))]) == 10
    assert int(compiled) == 0


@pytest.mark.parametrize(("slots", "staged", "chunk"), [(5, 3, 16), (1, 1, 30)])
def test_rows_are_those_of_generate_in_any_schedule(slots: int, staged: int, chunk: int, expected: Generated) -> None:
    for seed in range(6):
        random = np.random.default_rng(seed)
        order = random.permutation(B)[: random.integers(1, B + 1)]
        numbers: dict[str, Any] = {
            "passes": int(random.integers(1, 6)),
            "steps": int(random.integers(1, 40)),
            "refill": float(random.choice([0.0, 0.3, 1.0])),
            "window": int(random.integers(1, 2 * B)),
            "prefixes": 2,
        }
        late = [x for request in requests(order) for x in [None] * random.integers(0, 3) + [request]]
        results = [*engine(slots, staged, chunk, **numbers).serve(late)]
        assert sorted(r.request.id for r in results) == sorted(IDS[i] for i in order)
        for result in results:
            assert_same(result, expected, IDS.index(result.request.id))


def test_a_window_bounds_what_is_taken_in() -> None:
    taken, most = 0, 0

    def source() -> Any:
        nonlocal taken
        for request in requests():
            taken += 1
            yield request

    for given, _ in enumerate(engine(5, 3, 16, window=9).serve(source())):
        most = max(most, taken - given)
    assert most == 9


def test_a_short_row_does_not_wait_for_long_ones() -> None:
    """Slots are filled again the moment a row ends: the work is what the rows need, not what the longest needs."""
    lengths = [24, *[2] * 44]
    plain = dataclasses.replace(settings(0), temperature=0.0, eos=[-1, -1], stop=[[1, 1]])
    asked = [Request(i, [1], dataclasses.replace(plain, max_new_tokens=n)) for i, n in enumerate(lengths)]
    made = Engine(MODEL, np.zeros_like(TABLE), options=Options(slots=5, staged=3, chunk=16, refill=0.2))
    order = [result.request.id for result in made.serve(asked)]
    assert order[:40] == [*range(1, 41)]  # then nobody waits, and the rest ends within one call
    assert made.stats.steps == 24
    assert made.stats.busy == sum(lengths)


def test_running_rows_do_not_starve() -> None:
    """Between two steps there are at most ``passes`` passes of prefill while a row runs."""
    turns: list[Turn] = []
    options = Options(slots=5, staged=3, chunk=16, passes=2, steps=1)
    made = Engine(MODEL, TABLE, options=options, on_turn=turns.append)
    assert len([*made.serve(requests())]) == B
    assert max(turn.passes for turn in turns) == 2
    assert any(turn.passes and turn.steps for turn in turns)


def test_prompts_are_not_computed_ahead_in_half_empty_passes() -> None:
    """A pass costs the same for one row as for all: 16 prompts of one chunk, 4 at a time, are 4 passes."""
    asked = [Request(i, [1] * 17, Settings(max_new_tokens=5 + i % 3, temperature=0)) for i in range(16)]
    made = Engine(MODEL, TABLE, options=Options(slots=3, staged=4, chunk=16, steps=1))
    assert len([*made.serve(asked)]) == 16
    assert (made.stats.passes, made.stats.computed) == (4, 16 * 16)


def test_the_longest_of_the_last_requests_begin_first() -> None:
    """So that no slot is left with a long row when all others have ended; while more may come, it is first come."""
    lengths = [2, 2, 2, 2, 2, 10]
    asked = [Request(i, [1], Settings(max_new_tokens=n, temperature=0)) for i, n in enumerate(lengths)]
    for window, steps in ((7, 10), (2, 14)):
        made = Engine(MODEL, TABLE, options=Options(slots=2, staged=2, chunk=16, window=window))
        assert len([*made.serve(asked)]) == 6
        assert made.stats.steps == steps


def test_samples_are_those_of_generate() -> None:
    """Sample i draws with ``fold_in(row_key, i)``: more samples than slots, and one alone, beside each other."""
    many = [dataclasses.replace(settings(4), max_new_tokens=N, temperature=1.0, num_samples=k) for k in (7, 3, 1)]
    asked = [Request(s.num_samples, PROMPTS[4], s, KEYS[4]) for s in many]
    results = {r.request.id: r.out.to_lists() for r in engine(5, 3, 16).serve(asked)}
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEYS[4], np.arange(B, dtype=np.uint32))
    same = dataclasses.replace(many[0], num_samples=1, stop=[STOP[4]] * B, eos=EOS[[4] * B])
    numbers = {name: np.full(B, getattr(same, name)) for name in NUMBERS}
    rows = generate(
        MODEL, TABLE, [PROMPTS[4]] * (B - 1) + [[0] * 79], key=keys, settings=dataclasses.replace(same, **numbers)
    ).to_lists()
    assert [results[7], results[3]] == [rows[:7], rows[:3]]
    assert len({str(row) for row in rows[:7]}) > 2
    assert len(results[1]) == 1


def test_requests_that_differ_in_structure_are_grouped(expected: Generated) -> None:
    """Plain rows come back as they are, beside a grammar, a bias, and lists of their own."""
    others = [
        Settings(max_new_tokens=4, temperature=0, eos=[6], choices=[[1, 2], [3]], logit_bias={3: 50.0}),
        Settings(max_new_tokens=4, temperature=0, eos=[6], choices=[[1, 2], [3]], logit_bias={1: 50.0}),
    ]
    asked = requests(range(6)) + [Request(i, [1], s) for i, s in enumerate(others)] + requests(range(6, 12))
    made = Engine(MODEL, TABLE, options=Options(slots=5, staged=3, chunk=16))
    results = {r.request.id: r for r in made.serve(asked)}
    for i in range(12):
        assert_same(results[IDS[i]], expected, i)
    assert [results[i].out.to_lists() for i in (0, 1)] == [[[3, 6]], [[1, 2, 6]]]
    assert len(made._groups) == 2  # two biases are numbers of one program


def test_what_cannot_be_served_comes_back_with_the_reason() -> None:
    model, table = markov_model(context=300), np.zeros((V, V), np.float32)
    greedy = Settings(max_new_tokens=3, temperature=0)
    bad = {
        "non-empty": Request(0, [], greedy),
        "[0, 7)": Request(1, [V], greedy),
        "298 + 3 = 301": Request(2, [1] * 298, greedy),
        "jax.random.key": Request(3, [1], Settings(max_new_tokens=3)),
        "logit_bias": Request(4, [1], dataclasses.replace(greedy, logit_bias={V: 1.0})),
    }
    results = [*Engine(model, table).serve(bad.values())]
    assert [r.request.id for r in results] == [0, 1, 2, 3, 4]
    for words, result in zip(bad, results, strict=True):
        assert words in str(result.error)
        assert result.out is None
    for name, value in (("slots", 0), ("refill", 2.0), ("prefixes", -1)):
        with pytest.raises(ValueError, match=name):
            Engine(model, table, options=Options()._replace(**{name: value}))


def test_a_watch_ends_its_row_and_no_other(expected: Generated) -> None:
    def ends_after(n: int) -> Any:
        def make() -> Any:
            left = iter([False] * (n - 1) + [True])
            return lambda token: next(left)

        return make

    rows = [i for i in range(B) if expected.length[i] >= 6][:8]
    asked = [r._replace(watch=ends_after(k)) if (k := i % 3 * 2) else r for i, r in enumerate(requests(rows))]
    for result in engine(5, 3, 16, steps=7).serve(asked):
        place = rows.index(IDS.index(result.request.id))
        row, n = rows[place], place % 3 * 2
        if not n:
            assert_same(result, expected, row)
            continue
        assert result.out is not None
        assert result.out.to_lists() == [expected.tokens[row, :n].tolist()]
        assert result.out.finish.tolist() == [Finish.STOP]
        np.testing.assert_allclose(result.out.logprob[0, : n + 1], [*expected.logprob[row, :n], 0], 1e-4, 1e-6)


def test_what_is_cancelled_comes_back_so_and_changes_no_other_row(expected: Generated) -> None:
    """Requests that wait, that are staged and that run; from between the results, and from among the requests."""
    gone: list[str] = []

    def source() -> Any:
        for i, request in enumerate(requests()):
            yield request
            if i % 5 == 4 and made.cancel(IDS[i]):  # the last one that was taken
                gone.append(IDS[i])

    made, results = engine(5, 3, 16, steps=2, window=20), {}
    for result in made.serve(source()):
        assert result.request.id not in results
        results[result.request.id] = result
        assert not made.cancel("nobody")
        waits = [i for i in range(B) if IDS[i] not in results and i % 3 == 0]
        if len(results) % 4 == 0 and waits and made.cancel(IDS[waits[0]]):
            gone.append(IDS[waits[0]])
    assert set(results) == set(IDS)
    assert len(gone) >= 8
    for i, name in enumerate(IDS):
        if name in gone:
            assert (results[name].out, results[name].error) == (None, "cancelled")
        else:
            assert_same(results[name], expected, i)


def test_draining_finishes_the_rows_in_slots_and_takes_no_more(expected: Generated) -> None:
    done: list[Result] = []
    for result in engine(5, 3, 16, steps=1).serve(requests(), draining=lambda: len(done) >= 7):
        done.append(result)
    assert 7 <= len(done) <= 7 + 5
    for result in done:
        assert_same(result, expected, IDS.index(result.request.id))


def test_rows_that_draft_from_their_own_text_write_the_same_in_fewer_steps() -> None:
    """A decoder whose rows take several tokens in a step: greedy rows are the arg-max chain of the table."""
    drafting = Settings(max_new_tokens=N, temperature=0, prompt_lookup=3)
    made = Engine(MODEL, TABLE, options=Options(slots=5, staged=3, chunk=16))
    results = [*made.serve(Request(i, PROMPTS[i], drafting) for i in range(8))]
    for result in results:
        text = ([PROMPTS[result.request.id][0]] + PROMPTS[result.request.id])[-2:]
        for _ in range(N):
            text.append(int(TABLE[text[-2], text[-1]].argmax()))
        assert result.out is not None
        assert result.out.to_lists() == [text[2:]]
    assert made.stats.busy == 8 * N
    assert made.stats.steps < 2 * N


# A transformer: real caches, prefixes that are shared, slots that are used again.

CONFIG = TransformerConfig(
    vocab_size=64,
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_mlp=64,
    context_length=1024,
    tied=False,
)
TINY = transformer(CONFIG)
PARAMS = init_params(CONFIG, jax.random.key(2))
SLOTS = Options(slots=4, staged=3, chunk=16)


def texts(n: int, shared: int, seed: int = 3) -> list[list[int]]:
    """n prompts: a third begin with one prefix, a third with another, the rest alone."""
    random = np.random.default_rng(seed)
    first, second = (random.integers(1, 64, shared).tolist() for _ in range(2))
    heads = [[first, second, []][i % 3] for i in range(n)]
    return [head + random.integers(1, 64, random.integers(1, 40)).tolist() for head in heads]


def asked_of_tiny(prompts: list[list[int]]) -> list[Request]:
    keys = row_keys(SEED, len(prompts))
    lengths = np.random.default_rng(4).integers(1, 20, len(prompts))
    chosen = [Settings(max_new_tokens=int(n), temperature=[0.0, 0.9][i % 2], eos=[0]) for i, n in enumerate(lengths)]
    return [Request(i, p, s, k) for i, (p, s, k) in enumerate(zip(prompts, chosen, keys, strict=True))]


def outputs(made: Engine, asked: list[Request]) -> dict[Any, list[int]]:
    return {r.request.id: r.out.to_lists()[0] for r in made.serve(asked) if r.out is not None}


def test_a_transformer_writes_what_it_writes_alone_with_and_without_shared_prefixes() -> None:
    prompts = texts(24, 150)
    asked = asked_of_tiny(prompts)
    made, plain = Engine(TINY, PARAMS, options=SLOTS), Engine(TINY, PARAMS, options=SLOTS._replace(prefixes=0))
    found = outputs(made, asked)
    numbers = {
        "max_new_tokens": np.array([r.settings.max_new_tokens for r in asked]),
        "temperature": np.array([r.settings.temperature for r in asked]),
    }
    alone = generate(TINY, PARAMS, prompts, key=row_keys(SEED, 24), settings=Settings(**numbers, eos=[0])).to_lists()
    assert found == dict(enumerate(alone))
    assert outputs(plain, asked) == found
    assert made.stats.shared == 16 * 150
    assert made.stats.computed == plain.stats.computed - 14 * 150
    assert plain.stats.shared == 0


def test_rows_of_uneven_lengths_see_what_they_see_otherwise() -> None:
    """In the blocks of 128, 128, 256 and 512 tokens, whose ends some rows have just reached."""
    lengths = np.array([1, 127, 128, 129, 255, 256, 300, 600], np.int32)
    prompts = np.random.default_rng(6).integers(0, 64, (len(lengths), 601)).astype(np.int32)
    at = np.zeros((len(lengths), 0), np.int32)
    _, cache = TINY.apply(PARAMS, prompts, TINY.init_cache(PARAMS, len(lengths), 1000), lengths=lengths, logits_at=at)
    found = [TINY.apply(PARAMS, prompts[:, -1:], x) for x in (cache, kvcache.uneven(cache))]
    np.testing.assert_allclose(found[1][0], found[0][0], 1e-5, 1e-5)
    for one, other in zip(jax.tree.leaves(found[1][1]), jax.tree.leaves(found[0][1]), strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-5)


def test_neighbours_schedule_and_shared_prefixes_change_no_bit() -> None:
    """Every product has one shape, so a row's log probabilities are the same to the last bit."""
    asked = asked_of_tiny(texts(12, 100))
    whole = {r.request.id: r.out for r in Engine(TINY, PARAMS, options=SLOTS).serve(asked)}
    for i in (0, 4, 8, 11):
        alone = Engine(TINY, PARAMS, options=SLOTS._replace(prefixes=0, steps=3, passes=1))
        (result,) = alone.serve([asked[i]])
        n = int(result.out.length[0])
        for name in ("tokens", "logprob", "processed_logprob", "margin"):
            one, other = getattr(result.out, name), getattr(whole[i], name)
            np.testing.assert_array_equal(one[0, :n], other[0, :n], name)


def test_a_row_that_ends_nan_leaves_nothing_in_its_slot() -> None:
    """NaN keys and values are not there for the row that comes next, though 0 * NaN would be NaN."""
    bad = PARAMS | {"embed": PARAMS["embed"].at[63].set(np.nan)}
    good = [r for r in asked_of_tiny(texts(12, 0)) if 63 not in r.prompt]
    spoilt = [Request(-i, [1, 2, 63, 5] * 30, good[0].settings, good[0].key) for i in range(1, 9)]
    clean = {r.request.id: r.out for r in Engine(TINY, PARAMS, options=SLOTS).serve(good)}
    results = {r.request.id: r.out for r in Engine(TINY, bad, options=SLOTS).serve([*spoilt, *good])}
    assert len(good) >= 6
    assert {int(results[r.id].finish[0]) for r in spoilt} == {Finish.NAN}
    for request in good:
        one, other = results[request.id], clean[request.id]
        if 63 not in other.tokens:
            np.testing.assert_array_equal(one.tokens, other.tokens)
            np.testing.assert_array_equal(one.logprob, other.logprob)
