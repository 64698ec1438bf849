"""What is shipped: the wheel holds exactly the package, its types serve a consumer, its links resolve."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("adapters", "bench", "loader", "server")


@pytest.mark.parametrize("name", FOLDERS)
def test_the_folders_are_reached_through_the_package(name: str) -> None:
    link = ROOT / "src" / "loadstone" / name
    assert link.is_symlink()
    assert link.resolve() == ROOT / name


def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("loadstone-")]
    source = ROOT / "src" / "loadstone"
    expected = {f"loadstone/{path.relative_to(source)}" for path in source.rglob("*.py")} | {
        "loadstone/py.typed"
    }
    for folder in FOLDERS:
        expected |= {
            f"loadstone/{folder}/{path.relative_to(ROOT / folder)}" for path in (ROOT / folder).rglob("*.py")
        }
    assert set(names) == expected
    assert len(names) == len(set(names))


def test_a_consumer_s_wrong_call_fails_type_checking(tmp_path: Path) -> None:
    good = "import loadstone\nckpt = loadstone.open('x')\nshape: tuple[int, ...] = ckpt.info('w').shape\n"
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text(good + "loadstone.open('x', variant=1)\nckpt.info(3)\n")
    check = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--cache-dir",
        str(ROOT / ".mypy_cache"),
        "good.py",
        "bad.py",
    ]
    done = subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert 'Argument "variant"' in done.stdout
    assert 'Argument 1 to "info"' in done.stdout
    assert "good.py" not in done.stdout
