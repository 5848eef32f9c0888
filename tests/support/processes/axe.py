"""axe-core, the accessibility checker of browsers' developer tools, from the npm registry."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

from tests.support.processes.browser import Page

VERSION = "4.10.3"
FOLDER = Path(__file__).resolve().parents[3] / "target" / f"axe-core-{VERSION}"


def axe_source() -> str | None:
    """Text of axe.min.js, fetched once; None where npm is missing or cannot fetch it."""
    script = FOLDER / "axe.min.js"
    if script.exists():
        return script.read_text()
    npm = shutil.which("npm")
    if npm is None:
        return None
    FOLDER.mkdir(parents=True, exist_ok=True)
    command = [npm, "pack", f"axe-core@{VERSION}", "--silent", "--pack-destination", str(FOLDER)]
    if subprocess.run(command, capture_output=True, timeout=120, check=False).returncode:
        return None
    with tarfile.open(FOLDER / f"axe-core-{VERSION}.tgz") as archive:
        packed = archive.extractfile("package/axe.min.js")
        assert packed is not None
        text = packed.read().decode()
    script.write_text(text)
    return text


async def violations(page: Page, source: str) -> list[str]:
    """Rules that the page breaks, each with its impact and the elements."""
    await page.evaluate(f"{source}; typeof axe")
    found: list[dict[str, Any]] = json.loads(
        await page.evaluate("axe.run().then((result) => JSON.stringify(result.violations))")
    )
    return [
        f"{rule['id']} ({rule['impact']}): {[node['target'] for node in rule['nodes']]}"
        for rule in found
    ]
