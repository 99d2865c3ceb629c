"""Open mutated small checkpoints of every family: each is refused in one line that names the file, or is sound.

    python scripts/fuzz_loaders.py [HOW_MANY] [SEED] [FIRST]       # 10,000 take half a minute

Cases FIRST (0) and on of a seed; each has random numbers of its own, so that a run may be cut into several.

Half are GGUF files with bytes flipped, cut or repeated; half are Hugging Face directories of which one file is so, or
has a hostile value in its JSON. A crash, a hang (SIGALRM after 20 s) or more than 200 MB end the run with the case.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import tiny_families
import tiny_families_gguf
import tiny_gguf
import tiny_hf
from test_checkpoint_hostile import VALUES, attempt, checked, places, replaced

LIMIT = 200 << 10  # KiB beyond what is used before the first case


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, or a stretch of them repeated or left out; mostly near the front, where the header is."""
    out, front = bytearray(data), min(len(data), 4000) if rng.random() < 0.8 else len(data)
    kind, at = rng.randrange(4), rng.randrange(front)
    if kind == 0:
        return data[:at]
    if kind == 1:
        n = rng.randrange(1, 40)
        return bytes(out[:at] + out[at : at + n] * 2 + out[at + n :])
    if kind == 2:
        return bytes(out[:at] + out[at + rng.randrange(1, 40) :])
    for _ in range(rng.randrange(1, 4)):
        out[rng.randrange(front)] ^= 1 << rng.randrange(8)
    return bytes(out)


def one(root: Path, sound: dict[str, Any], rng: random.Random) -> bool:
    """One case; whether it was refused."""
    name = rng.choice(list(sound))
    if rng.random() < 0.5:
        path = root / "m.gguf"
        path.write_bytes(damaged(sound[name]["gguf"], rng))
        return checked(attempt(path), path)
    folder, files = sound[name]["folder"], sound[name]["files"]
    file = rng.choice(list(files))
    if file.endswith(".json") and rng.random() < 0.7:
        values = json.loads(files[file])
        at = rng.choice(list(places(values)))
        (folder / file).write_text(json.dumps(replaced(values, at, rng.choice(VALUES), rng)))
    else:
        (folder / file).write_bytes(damaged(files[file], rng))
    try:
        return checked(attempt(folder), folder)
    finally:
        (folder / file).write_bytes(files[file])


def main(count: int, seed: int, begin: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        root, sound = Path(temporary), {}
        for i, name in enumerate(tiny_families.VARIANTS):
            folder = tiny_hf.write(root / str(i), tiny_families.tiny(name))
            files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
            packed = tiny_families_gguf.tiny(name) if "dynamic" not in name else tiny_gguf.tiny()
            gguf = tiny_gguf.write(root / "m.gguf", packed).read_bytes()
            sound[name] = {"folder": folder, "files": files, "gguf": gguf}
            assert attempt(folder) is attempt(root / "m.gguf") is None
        before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
        for i in range(begin, begin + count):
            signal.alarm(20)
            try:
                refused += one(root, sound, random.Random(f"{seed}, {i}"))
                assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + LIMIT, "too much memory"
            except BaseException:
                sys.stderr.write(f"case {i} of seed {seed}: scripts/fuzz_loaders.py 1 {seed} {i}\n")
                raise
        signal.alarm(0)
    sys.stdout.write(f"{count} files: {refused} refused, {count - refused} sound\n")


given = [int(word) for word in sys.argv[1:]]
main(*given, *(10_000, 0, 0)[len(given) :])
