"""One run: a participant does one work, in a process of its own, and gives figures."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Failed", "Setup", "runs_in", "tell_versions"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROMPT, NEW, PREFILL = 16, 64, 512


class Failed(Exception):
    """Why a run gave nothing."""


class Setup(NamedTuple):
    """pythons: of "ours", "newest" and "peers", None where there is none. limit: seconds that a run may take."""

    model: str
    work: Path
    pythons: dict[str, str | None]
    threads: int
    limit: float
    smoke: bool = False

    @property
    def hf(self) -> Path:
        return self.work / "hf"

    def ct2(self, kind: str) -> Path:
        return self.work / f"ct2-{kind}"

    # Running a process.

    def call(self, who: str, *arguments: str, limit: float | None = None) -> str:
        """What it prints on stdout. Failed: no such Python, an error, or too long."""
        python = self.pythons[who]
        if python is None:
            raise Failed(f"no {'--python-newest' if who == 'newest' else 'Python for ' + who}")
        seconds = self.limit if limit is None else limit
        try:
            process = subprocess.Popen(
                [python, *arguments],
                cwd=ROOT,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(str(error)) from None
        with process:
            try:
                out, err = process.communicate(timeout=seconds)
            except BaseException as stopped:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(stopped, subprocess.TimeoutExpired):
                    raise Failed(f"longer than {seconds:.0f} s") from None
                raise
        if process.returncode:
            last = [line.strip() for line in err.splitlines() if line.strip()]
            raise Failed(last[-1][:200] if last else f"exit code {process.returncode}")
        return out

    def _environment(self) -> dict[str, str]:
        """That of this process, without settings of jax, with the checkout, its own cache, and the threads."""
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA_", "TF_"))}
        count = str(self.threads)
        own = {"JAXDECODE_CACHE": str(self.work / "cache"), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        return {**plain, **own, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count}

    # The works of jaxdecode.

    def bench(self, who: str, *arguments: str) -> dict[str, Any]:
        """The report of `jaxdecode bench`."""
        options = ["--compile-cache", "--json", *arguments]
        return json.loads(self.call(who, "-m", "jaxdecode", "bench", self.model, *options))

    def figures(self, participant: str, work: str) -> dict[str, float]:
        """Do a work and return its figures."""
        if participant in ("ours", "newest"):
            kind, _, batch = work.rpartition("-")
            own = {"second-process": self._second_process, "memory": self._memory, "sampling": self._sampling}
            if work in own:
                return own[work](participant)
            if kind in ("greedy", "int8"):
                return self._decode(participant, kind, int(batch))
            if kind in ("prefill", "prefill-int8"):
                return self._prefill(participant, "int8" if kind.endswith("int8") else "greedy", int(batch))
            if kind in ("beam", "beam-int8", "json", "lookup_copy", "lookup_fresh"):
                return self._strategy(participant, kind, int(batch))
            if kind == "top-p":
                return self._top_p(participant, int(batch))
            return self._cache(participant) if work == "cache" else self._context(participant, int(batch))
        return self._peer(participant, work)

    def _decode(self, who: str, mode: str, batch: int) -> dict[str, float]:
        floor = ["--floor"] if (mode, batch) == ("greedy", 1) else []
        sizes = ["--modes", mode, "--batch-sizes", f"{batch}", "--prompt-lengths", f"{PROMPT}"]
        found = self.bench(who, *sizes, "--new-tokens", f"{self.new}", "--runs", f"{runs_in(batch)}", *floor)
        return {k: v for k, v in found["rows"][0].items() if isinstance(v, int | float)}

    def _prefill(self, who: str, mode: str, batch: int) -> dict[str, float]:
        sizes = ["--modes", mode, "--batch-sizes", f"{batch}", "--prompt-lengths", f"{self.prefill}"]
        (row,) = self.bench(who, *sizes, "--new-tokens", "2", "--runs", f"{runs_in(8 * batch)}")["rows"]
        first = row["first_token_seconds"]
        return {"tokens_per_second": batch * self.prefill / first, "first_token_seconds": first}

    def _strategy(self, who: str, kind: str, batch: int) -> dict[str, float]:
        mode, _, scheme = kind.partition("-")
        sizes = ["--modes", mode, "--batch-sizes", f"{batch}", "--prompt-lengths", f"{PROMPT}"]
        weights = ["--quantize", scheme] if scheme else []
        (row,) = self.bench(who, *sizes, "--new-tokens", f"{self.new}", "--runs", "3", *weights)["rows"]
        speed, step = row["times_greedy"], row["step_seconds"]
        return {"tokens_per_second": batch / step, "times_greedy": speed, "over_greedy": 1 / speed}

    def _top_p(self, who: str, batch: int) -> dict[str, float]:
        sizes = ["--batch-sizes", f"{batch}", "--prompt-lengths", f"{PROMPT}", "--new-tokens", f"{self.new}"]
        steps = self._steps(who, "--modes", "greedy,top_p,greedy", *sizes, "--runs", "2")
        return {"ratio": 2 * steps[1] / (steps[0] + steps[2]), "greedy_seconds": steps[0], "top_p_seconds": steps[1]}

    def _cache(self, who: str) -> dict[str, float]:
        sizes = ["--batch-sizes", "1", "--prompt-lengths", f"{128 - self.new}", "--new-tokens", f"{self.new}"]
        few, many = (self._steps(who, *sizes, "--cache-len", n, "--runs", "4")[0] for n in ("256", "4096"))
        return {"ratio": many / few, "few_seconds": few, "many_seconds": many}

    def _context(self, who: str, batch: int) -> dict[str, float]:
        lengths = ",".join(str(n - self.new // 2) for n in (128, 1024))
        sizes = ["--batch-sizes", f"{batch}", "--prompt-lengths", lengths, "--new-tokens", f"{self.new}"]
        short, long = self.bench(who, *sizes, "--runs", f"{runs_in(8 * batch)}")["rows"]
        names = ("bytes_per_step", "multiplications_per_step")
        counted = max(long[name] / short[name] for name in names)
        grown = long["step_seconds"] / short["step_seconds"]
        return {"ratio": grown / counted, "grown": grown, "counted": counted}

    def _steps(self, who: str, *arguments: str) -> list[float]:
        return [row["step_seconds"] for row in self.bench(who, *arguments)["rows"]]

    def _memory(self, who: str) -> dict[str, float]:
        """The second of two processes: the first leaves its compiled programs."""
        sizes = ["--modes", "int8", "--batch-sizes", "1", "--prompt-lengths", f"{PROMPT}", "--new-tokens", "16"]
        self.bench(who, *sizes, "--runs", "1")
        (row,) = self.bench(who, *sizes, "--runs", "1")["rows"]
        held = row["param_bytes"] + row["cache_allocated_bytes"]
        return {"bytes": row["peak_above_base_bytes"] - held, "held_bytes": held, "peak_bytes": row["peak_bytes"]}

    def _sampling(self, who: str) -> dict[str, float]:
        spec = {"batch": 8, "vocab_size": 1 << (12 if self.smoke else 18), "runs": 3}
        return json.loads(self.call(who, str(HERE / "sampling_alone.py"), json.dumps(spec)))

    def _second_process(self, who: str) -> dict[str, float]:
        options = ["--model", self.model, "--max-new-tokens", "16", "--temperature", "0", "--json"]
        times = []
        for _ in range(3):
            begin = time.perf_counter()
            self.call(who, "-m", "jaxdecode", "generate", *options, "The capital of France is")
            times.append(time.perf_counter() - begin)
        return {"seconds": statistics.median(times[1:]), "first_process_seconds": times[0]}

    # The peers.

    def _peer(self, participant: str, work: str) -> dict[str, float]:
        kind, _, batch = work.rpartition("-")
        system, _, scheme = participant.partition("-")
        filled = kind == "prefill"
        rows, scheme = int(batch), scheme or "float32"
        if system == "ctranslate2" and not self.ct2(scheme).is_dir():
            raise Failed("no converted model")
        spec = {
            "batch": rows,
            "prompt": self.prefill if filled else PROMPT,
            "new": 1 if filled else self.new,
            "runs": runs_in(8 * rows if filled else rows),
            "beams": 4 if kind == "beam" else 1,
            "threads": self.threads,
            **self.about(),
            "ct2": str(self.ct2(scheme)),
        }
        found = json.loads(self.call("peers", str(HERE / "systems.py"), system, json.dumps(spec)).splitlines()[-1])
        first, step = found["first_token_seconds"], found["step_seconds"]
        speed = rows * self.prefill / first if filled else rows / step
        return {"tokens_per_second": speed, **{k: v for k, v in found.items() if v is not None}}

    @property
    def new(self) -> int:
        return 8 if self.smoke else NEW

    @property
    def prefill(self) -> int:
        return 64 if self.smoke else PREFILL

    # What is made once.

    def about(self) -> dict[str, Any]:
        """The model for the peers: its GGUF file (None if it is none), a Hugging Face copy, how many ids it knows."""
        return json.loads((self.work / "model.json").read_text())

    def prepare(self, systems: Sequence[str]) -> None:
        """Make the copies of the model that these peers read, unless they are there. Failed: that cannot be."""
        self.work.mkdir(parents=True, exist_ok=True)
        code = (
            "import json, sys, pathlib, jaxdecode; from jaxdecode.checkpoint import find\n"
            "model, folder, told = sys.argv[1:]\n"
            "loaded, path = jaxdecode.load(model), find(model, lambda *args: None).path\n"
            "pathlib.Path(folder).is_dir() or jaxdecode.save(loaded, folder)\n"
            "gguf = str(path) if path.suffix == '.gguf' else None\n"
            "about = {'hf': folder, 'gguf': gguf, 'vocab_size': loaded.config.vocab_size, 'model': model}\n"
            "pathlib.Path(told).write_text(json.dumps(about))\n"
        )
        if not (self.work / "model.json").is_file() or self.about()["model"] != self.model:
            if self.hf.is_dir():
                raise Failed(f"{self.work} holds another model; give another --work")
            self.call("ours", "-c", code, self.model, str(self.hf), str(self.work / "model.json"), limit=300)
        for kind in ("float32", "int8") if "ctranslate2" in systems else ():
            if not self.ct2(kind).is_dir():
                self.call(
                    "peers", str(HERE / "systems.py"), "convert", str(self.hf), str(self.ct2(kind)), kind, limit=300
                )


def runs_in(rows: int) -> int:
    """Timed runs within a process: fewer where one takes long."""
    return 3 if rows < 8 else 2 if rows < 32 else 1


def tell_versions(setup: Setup) -> dict[str, Any]:
    """Versions of every participant, {} of a Python that has none."""
    code = "import json, platform as p, jax; print(json.dumps({'python': p.python_version(), 'jax': jax.__version__}))"
    found: dict[str, Any] = {}
    for who in ("ours", "newest"):
        with contextlib.suppress(Failed):
            found[who] = json.loads(setup.call(who, "-c", code))
    with contextlib.suppress(Failed):
        found["peers"] = json.loads(setup.call("peers", str(HERE / "systems.py"), "installed"))
    return found
