"""Puts a built site beside those of other versions, and prints its folder.

The theme offers the versions of ``versions.json`` in its header; who opens the folder of all of
them comes to the newest one.
"""

import argparse
import json
import shutil
from pathlib import Path

from packaging.version import Version

from lightning_par import __version__


def add(site: Path, versions: Path, version: str) -> Path:
    """Copy a site to the folder of its version; write the list of all versions, newest first."""
    folder = versions / version
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(site, folder)
    found = sorted((p.name for p in versions.iterdir() if p.is_dir()), key=Version, reverse=True)
    listed = [{"version": name, "title": name, "aliases": []} for name in found]
    listed[0]["aliases"] = ["latest"]
    (versions / "versions.json").write_text(json.dumps(listed, indent=1))
    newest = f'<!DOCTYPE html><meta http-equiv="refresh" content="0; url={found[0]}/">\n'
    (versions / "index.html").write_text(newest)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("versions", type=Path, help="folder of all versions")
    options = parser.parse_args()
    print(add(options.site, options.versions, __version__))
