"""What users install: the wheel, built from the sdist, holds our files and nothing else, and runs."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "scheduler", "spec", "model", "kernels", "train", "bench")
NOT_SHIPPED = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def ours() -> set[str]:
    """Every file that an installed verdraft must have, as a path in site-packages."""
    package = {f"verdraft/{p.name}" for p in (ROOT / "src/verdraft").iterdir() if p.is_file()}
    for folder in FOLDERS:
        files = (p.relative_to(ROOT) for p in (ROOT / folder).rglob("*") if p.is_file())
        package |= {f"verdraft/{p.as_posix()}" for p in files if "__pycache__" not in p.parts and p.name != ".gitkeep"}
    return package


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with sdist and wheel, built from a copy of the tree (setuptools writes next to its sources)."""
    tree = tmp_path_factory.mktemp("tree")
    for item in (*FOLDERS, "src"):
        shutil.copytree(ROOT / item, tree / item, symlinks=True, ignore=NOT_SHIPPED)
    for item in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / item, tree)
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=tree)
    return tree / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


def test_the_wheel_holds_our_files_and_no_others(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {n for n in names if ".dist-info/" not in n} == ours()
    assert any(n.endswith("licenses/LICENSE") for n in names)


def test_the_sdist_holds_plain_files(dist: Path) -> None:
    """The symlinks are followed: an unpacked sdist builds anywhere, and holds each source once."""
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = archive.getmembers()
    assert not [m.name for m in members if m.issym() or m.islnk()]
    assert ours() <= {m.name.partition("/src/")[2] for m in members}


def test_the_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    """A new environment that sees our dependencies but not this checkout."""
    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env/bin/python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    where = run(python, "-c", "import verdraft.kernels.base as b; print(b.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(site)
    assert "serve" in run(tmp_path / "env/bin/verdraft", "--help", cwd=tmp_path)
