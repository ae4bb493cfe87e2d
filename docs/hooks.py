"""Tables and charts of the measurements, made while the site is built.

A line ``<!-- table NAME -->`` of a page becomes a table; charts are in ``pictures/``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent))

import pictures
import tables

import fla_jax

ROOT = Path(__file__).parents[1]


def on_config(config: Any, **_: Any) -> Any:
    """The footer of each page has the version."""
    config.copyright = f"fla_jax {fla_jax.__version__}, MIT licence"
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the charts, and the changelog from the root."""
    for name, draw in pictures.GENERATED.items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=draw()))
    changelog = (ROOT / "CHANGELOG.md").read_text()
    files.append(File.generated(config, "changelog.md", content=changelog))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts tables in the place of their names, and a picture in that of the Mermaid diagram."""
    picture = "![the packages and their imports](pictures/packages.svg)"
    markdown = re.sub(r"^```mermaid\n.*?^```$", picture, markdown, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^<!-- table (\w+) -->$", lambda m: tables.TABLES[m[1]](), markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Marks short code, which site.css does not break at a hyphen or a dot."""
    return re.sub(r"<code>(?=[^<]{1,30}</code>)", '<code class="short">', html)
