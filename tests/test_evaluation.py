"""Perplexity, KL divergence and agreement on a text, by the library and by the commands `eval` and `quantize`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_hf
from cli_tools import Result, assert_bad, call

import jaxdecode as jd
from jaxdecode.evaluation import evaluate, windows_of_text
from jaxdecode.models.transformer import TransformerConfig, init_params, transformer
from jaxdecode.quantization_report import described_matrices
from jaxdecode.testing import count_compilations, markov_model

V = 7
RNG = np.random.default_rng(0)
TABLES = [jnp.asarray(RNG.normal(size=(V, V)) * 2, jnp.float32) for _ in range(2)]
IDS = RNG.integers(0, V, 101).tolist()
TEXT = "A man, a plan, a canal, and the end of the sentence stands there. Naïve, is it not?\n" * 6


def laws(table: Any) -> np.ndarray:
    z = np.asarray(table, np.float64)
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


@pytest.mark.parametrize(("window", "stride"), [(4, 4), (4, 1), (8, 3), (50, 50), (101, 101), (500, 7), (2, 2), (2, 1)])
def test_every_token_counts_once_with_what_the_window_holds_before_it(window: int, stride: int) -> None:
    for count in (2, 3, 9, 50, 51, 101):
        size = min(window, count)
        found = windows_of_text(count, size, min(stride, size))
        counted = [np.arange(f + s, f + n) for f, n, s in zip(*found, strict=True)]
        place = np.concatenate(counted)
        assert len(set(place.tolist())) == len(place)
        assert set(place.tolist()) >= set(range(1, min(size, count)))
        if stride < size:
            assert place.tolist() == list(range(1, count))
            later = [(f, s) for f, s in zip(found.first, found.start, strict=True) if f > 0]
            assert all(s >= size - stride for _, s in later)
        else:
            assert place.tolist() == [i for i in range(count) if i % size]
        assert (found.start >= 1).all()
        assert (found.first + found.length <= count).all()


def test_numbers_are_those_of_float64() -> None:
    """A table's law hangs on the last token alone, so windows change nothing but which tokens count."""
    model, (p, q) = markov_model(), (laws(table) for table in TABLES)
    last, now = np.array(IDS[:-1]), np.array(IDS[1:])
    first, other = evaluate([(model, TABLES[0]), (model, TABLES[1])], IDS, window=16, stride=5)
    assert first.counted == other.counted == 100
    assert first.kl is None
    for found, law in ((first, p), (other, q)):
        np.testing.assert_array_equal(found.tokens.place, np.arange(1, 101))
        np.testing.assert_allclose(found.tokens.logprob, law[last, now], rtol=1e-4, atol=1e-5)
        assert found.perplexity == pytest.approx(math.exp(-law[last, now].mean()), rel=1e-5)
    kl = (np.exp(p) * (p - q)).sum(1)[last]
    np.testing.assert_allclose(other.tokens.kl, kl, rtol=1e-4, atol=1e-5)
    assert other.kl == pytest.approx(kl.mean(), rel=1e-5)
    agrees = (p.argmax(1) == q.argmax(1))[last]
    np.testing.assert_array_equal(other.tokens.agrees, agrees)
    assert other.agreement == agrees.mean()
    same = evaluate([(model, TABLES[0])] * 2, IDS, window=16)[1]
    assert (same.kl, same.agreement, same.counted) == (0, 1, 101 - math.ceil(101 / 16))


def test_laws_with_impossible_tokens() -> None:
    """p log(p / q) is 0 where p is, and infinite where only q is 0."""
    p = jnp.array([[0.0, 0.0, -jnp.inf]] * 3)
    out = evaluate([(markov_model(), p), (markov_model(), jnp.zeros((3, 3)))], [0, 1, 0, 1], window=4)
    assert out[1].kl == pytest.approx(math.log(1.5), rel=1e-5)
    out = evaluate([(markov_model(), jnp.zeros((3, 3))), (markov_model(), p)], [0, 1, 0, 1], window=4)
    assert out[1].kl == math.inf


CONFIG = TransformerConfig(31, 16, 2, 4, 2, 4, 24, context_length=64)
PARAMS = init_params(CONFIG, jax.random.key(0))


def test_windows_of_a_transformer_are_scores_of_rows() -> None:
    model = transformer(CONFIG)
    ids = np.random.default_rng(1).integers(0, 31, 55)
    (found,) = evaluate([(model, PARAMS)], ids.tolist(), window=20, stride=12)
    expected = np.full(55, np.nan)
    for first in (0, 12, 24, 36):
        row = ids[first : first + 20]
        scores = np.asarray(jd.score(model, PARAMS, [row.tolist()]))[0]
        for i in range(1, len(row)):
            if np.isnan(expected[first + i]):
                expected[first + i] = scores[i]
    np.testing.assert_allclose(found.tokens.logprob, expected[1:], rtol=1e-4, atol=1e-4)


def test_longer_texts_compile_nothing_and_hold_no_more() -> None:
    models = [(markov_model(), TABLES[0]), (markov_model(), TABLES[1])]
    evaluate(models, IDS * 60, window=64)
    seen: list[float] = []
    with count_compilations() as count:
        evaluate(models, IDS * 300, window=64, progress=lambda text, fraction: seen.append(fraction))
    assert int(count) == 0
    assert len(seen) > 10
    assert seen == sorted(seen)
    assert seen[-1] == 1


def test_bad_arguments() -> None:
    model, table = markov_model(), TABLES[0]
    for kwargs, about in (
        ({"window": 1}, "window"),
        ({"window": 2.0}, "window"),
        ({"stride": 0}, "stride"),
        ({"window": 8, "stride": 9}, "stride"),
    ):
        with pytest.raises(ValueError, match=about):
            evaluate([(model, table)], IDS, **kwargs)
    for ids in ([1], [0, V], [[1, 2]], [0.5, 1.0]):
        with pytest.raises(ValueError, match="ids"):
            evaluate([(model, table)], ids)
    with pytest.raises(ValueError, match="models"):
        evaluate([], IDS)
    with pytest.raises(ValueError, match="vocabulary"):
        evaluate([(model, table), (model, jnp.zeros((3, 3)))], IDS)
    with pytest.raises(ValueError, match="context of 64"):
        evaluate([(transformer(CONFIG), PARAMS)], IDS, window=100)


def test_report_of_matrices() -> None:
    params = {name: np.zeros(shape, np.float32) for name, shape in (("a", (40, 64)), ("n", 3), ("z", (4, 32)))}
    params["a"] += RNG.normal(size=(40, 64)).astype(np.float32)
    params["a"][3, 5] = 30
    for scheme, inside in (("int4", True), ("int8", True), ("int3_affine", False)):
        q = jd.quantize(params, scheme)
        a, z = described_matrices(params, q, inside=inside)
        error = np.linalg.norm(params["a"] - jd.dequantize(q)["a"]) / np.linalg.norm(params["a"])
        assert a["error"] == pytest.approx(error, rel=1e-5)
        assert (a["name"], a["shape"], a["bytes"]) == ("a", [40, 64], q["a"].nbytes)
        assert (a["outliers"], z["outliers"], z["error"]) == (1, 0, 0)
        assert a["peak"] > 6
        assert 0.5 < a["error"] / a["model"] < 1.2
        assert (a["bound"] is not None) == inside
        if inside:
            assert a["model"] == pytest.approx(a["bound"] / math.sqrt(3), rel=1e-3)
            assert a["error"] <= a["bound"]


# The command line


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, "utf-8")
    return str(file)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXDECODE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield str(tiny_hf.write(tmp_path_factory.mktemp("models") / "tiny", tiny_hf.tiny()))


def told(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json", "--no-compile-cache")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_eval_of_the_toy_with_a_table(text: str, tmp_path: Path) -> None:
    table = tmp_path / "tokens.tsv"
    found = told("eval", "toy", "--text", text, "--window", "64", "--table", str(table))
    ids = jd.load("toy").tokenizer.encode(TEXT)
    assert (found["tokens"], found["window"], found["stride"], found["against"]) == (len(ids), 64, 64, None)
    header, *lines = [line.split("\t") for line in table.read_text("utf-8").splitlines()]
    assert header == ["place", "id", "token", "logprob"]
    assert len(lines) == found["counted"] == len(ids) - math.ceil(len(ids) / 64)
    assert [ids[int(place)] for place, *_ in lines] == [int(i) for _, i, *_ in lines]
    assert json.loads(lines[1][2]) == TEXT[2]
    mean = np.mean([float(line[3]) for line in lines])
    assert found["perplexity"] == pytest.approx(math.exp(-mean), rel=1e-5)
    short = told("eval", "toy", "--text", text, "--window", "64", "--stride", "16", "--max-tokens", "100")
    assert (short["tokens"], short["counted"], short["stride"]) == (100, 99, 16)


def test_eval_against_itself_unquantized(text: str, tiny: str, tmp_path: Path) -> None:
    table = tmp_path / "tokens.tsv"
    window = ("--window", "128", "--max-tokens", "300")
    found = told("eval", tiny, "--text", text, *window, "--quantize", "int3", "--table", str(table))
    assert found["against"] == tiny
    assert found["quantize"] == "int3"
    plain = told("eval", tiny, "--text", text, *window)
    assert "kl" not in plain
    assert found["reference_perplexity"] == pytest.approx(plain["perplexity"], rel=1e-6)
    assert found["kl"] > 1e-3
    assert 0 < found["agreement"] < 1
    header, *lines = [line.split("\t") for line in table.read_text("utf-8").splitlines()]
    assert header == ["place", "id", "token", "logprob", "reference_logprob", "kl", "agrees"]
    assert np.mean([float(line[5]) for line in lines]) == pytest.approx(found["kl"], rel=1e-4)
    assert np.mean([float(line[6]) for line in lines]) == pytest.approx(found["agreement"], rel=1e-4)
    shown = call("eval", tiny, "--text", text, *window, "--quantize", "int3", "--no-compile-cache")
    for number in (f"{found['perplexity']:.4f}", f"{found['kl']:.5f}", f"{found['agreement']:.2%}"):
        assert number in shown.out


def quantized(model: str, folder: Path, *options: str) -> Result:
    return call("quantize", model, "-o", str(folder), *options, "--no-compile-cache")


def test_quantize_by_rounding_then_eval_and_generate(text: str, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "rounded"
    result = quantized(tiny, folder, "--scheme", "int4", "--eval", text, "--max-tokens", "300")
    assert (result.code, result.err) == (0, "")
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert (report["method"], report["scheme"], report["range"]) == ("rounding", "int4", "max")
    loaded = jd.load(folder)
    expected = jd.quantize(jd.load(tiny).params, "int4")
    for a, b in zip(jax.tree.leaves(loaded.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
    assert report["bytes"]["after"] == sum(x.nbytes for x in jax.tree.leaves(expected))
    assert len(report["matrices"]) == 9
    assert all(m["error"] <= m["bound"] for m in report["matrices"])
    assert f"{report['effect']['perplexity']:.4f}" in result.out
    found = told("eval", str(folder), "--text", text, "--against", tiny, "--window", "128", "--max-tokens", "300")
    for name in ("perplexity", "reference_perplexity", "kl", "agreement"):
        assert found[name] == pytest.approx(report["effect"][name], rel=1e-3)
    write = ("--max-new-tokens", "5", "--json", "--no-compile-cache", "the and")
    assert call("generate", "--model", str(folder), *write).code == 0
    assert_bad(quantized(tiny, folder, "--scheme", "int4"), "a new or empty folder")
    assert_bad(quantized(str(folder), tmp_path / "twice", "--scheme", "int4"), "quantized ones")


def test_quantize_on_a_text(text: str, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "calibrated"
    how = ("--method", "gptq", "--text", text, "--rows", "8", "--window", "32", "--seed", "3", "--tune", "2")
    result = quantized(tiny, folder, "--scheme", "int2_affine", *how)
    assert (result.code, result.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    report = json.loads((folder / "report.json").read_text("utf-8"))
    assert report["effect"] is None
    assert (report["others"], report["seed"], report["text"]["rows"]) == ("int8_zero_g32", 3, 8)
    inner = [m for m in report["matrices"] if m["name"] != "embed"]
    assert len(inner) == 8
    assert all(m["product"] < m["product_by_rounding"] for m in inner)
    (embed,) = [m for m in report["matrices"] if m["name"] == "embed"]
    assert (embed["scheme"], embed["product"]) == ("int8_zero_g32", None)
    again = tmp_path / "again"
    assert quantized(tiny, again, "--scheme", "int2_affine", *how).code == 0
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_bad_command_lines(text: str, tiny: str, tmp_path: Path) -> None:
    new = tmp_path / "new"
    assert_bad(call("eval", "toy", "--text", str(tmp_path / "absent")), "absent")
    for data in (b"\xff\xfe\x00", b"", b"a"):
        bad = tmp_path / "bad.txt"
        bad.write_bytes(data)
        assert_bad(call("eval", "toy", "--text", str(bad)), "bad.txt: expected")
    assert_bad(call("eval", "toy", "--text", text, "--window", "8", "--stride", "9"), "stride")
    assert_bad(call("eval", "toy", "--text", text, "--table", str(tmp_path)), "folder")
    assert_bad(call("eval", tiny, "--text", text, "--against", "toy"), "--against")
    assert_bad(call("eval", tiny, "--text", text, "--quantize", "int9"), "int9")
    assert_bad(quantized(tiny, new, "--scheme", "int4", "--method", "gptq"), "--text")
    assert_bad(quantized(tiny, new, "--scheme", "int4", "--text", text), "--method gptq")
    assert_bad(quantized(tiny, new, "--scheme", "int4", "--tune", "1"), "--method gptq")
    assert_bad(quantized(tiny, new, "--scheme", "int4_tensor", "--method", "gptq", "--text", text, "--rows", "1",
                         "--window", "16"), "int4_tensor")  # fmt: skip
    assert_bad(quantized(tiny, new, "--scheme", "int4", "--method", "gptq", "--text", text), "windows of 512 tokens")
    assert_bad(quantized("toy", new, "--scheme", "int4"), "toy")
    assert_bad(quantized(tiny, new, "--scheme", "four"), "four")
    assert not new.exists()
