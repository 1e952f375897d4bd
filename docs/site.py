"""Builds the documentation site: python docs/site.py [FOLDER]

A page keeps the path that it has in the repository, so one relative link works on the site and on a git host.
A link to a file that is not Markdown leads, on the site, to a page that shows the file. A link whose text is the name
of a page shows, on the site, the page's title.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath

import yaml

ROOT = Path(__file__).resolve().parents[1]
FRONT = {"docs/README.md": "index.md", "README.md": "overview.md"}  # pages with another name on the site
CONFIG = ROOT / "docs" / "mkdocs.yml"
_PICTURES = (".svg", ".png")
_LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".jsonl": "json",
    ".sh": "bash",
    ".toml": "toml",
}
_PAGE_NAME = re.compile(r"\[`?[\w./-]+\.md`?\]\(")
_CODE = re.compile(r"(^(?P<fence>`{3,}).*?^(?P=fence)[ ]*$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


class BrokenLink(ValueError):
    """A link to a file that does not exist."""


def staged_name(path: str, root: Path = ROOT) -> str:
    """The name of the page that shows `path`, a file or folder of the repository."""
    if path in FRONT:
        return FRONT[path]
    if (root / path).is_dir():
        return f"{path}/index.md"
    if path.endswith("/README.md"):
        return path.removesuffix("README.md") + "index.md"
    return path if path.endswith((".md", *_PICTURES)) else f"{path}.md"


def links(text: str) -> list[str]:
    """The relative targets of a page's links, without anchors; code is skipped."""
    targets = [link[2] for link in _LINK.finditer(_CODE.sub("code", text))]
    return [target for target in targets if not _is_address(target)]


def rewritten(text: str, page: str, root: Path = ROOT) -> str:
    """The text of `page` with each relative link pointing to the staged name of its target, and with titles for names
    of pages."""
    here = PurePosixPath(staged_name(page, root)).parent

    def relink(link: re.Match[str]) -> str:
        if _is_address(link[2]):
            return link[0]
        path = resolved(page, link[2], root)
        shown = f"[{title(path, root)}](" if _PAGE_NAME.fullmatch(link[1]) else link[1]
        return f"{shown}{_relative(PurePosixPath(staged_name(path, root)), here)}{link[3]}"

    return _outside_code(text, lambda part: _LINK.sub(relink, part))


def resolved(page: str, target: str, root: Path = ROOT) -> str:
    """The path from the root of the repository of a link on `page`; of a folder its README.md, if it has one."""
    path = (root / page).parent / target
    if not path.exists():
        raise BrokenLink(f"{page}: {target} does not exist; correct the link")
    readme = path / "README.md"
    return (readme if readme.exists() else path).resolve().relative_to(root.resolve()).as_posix()


def title(path: str, root: Path = ROOT) -> str:
    """The name of a page in the navigation, or else its first heading."""
    (heading,) = re.findall(r"\A# (.*)$", (root / path).read_text(), re.MULTILINE) or [path]
    return _navigation().get(path, heading)


def stage(folder: Path, pages: Iterable[str], root: Path = ROOT) -> None:
    """Writes `pages`, and everything that they link to, directly or not, below `folder`."""
    waiting, seen = list(pages), set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        if not (root / path).exists():
            raise BrokenLink(f"docs/mkdocs.yml: nav names {path}, which does not exist; correct the name")
        seen.add(path)
        target = folder / staged_name(path, root)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(_PICTURES):
            shutil.copyfile(root / path, target)
            continue
        text = _text(path, root)
        waiting += [resolved(path, link, root) for link in links(text)]
        target.write_text(_without_search(path, rewritten(text, path, root)))


def build(folder: Path) -> None:
    """Builds the site into `folder`; ends with the builder's messages when a link or an anchor leads nowhere."""
    with tempfile.TemporaryDirectory() as name:
        project = Path(name)
        stage(project / "pages", [*navigation(), *markdown_pages()])
        shutil.copytree(ROOT / "docs" / "assets", project / "pages" / "assets")
        config = CONFIG.read_text().replace("ROOT", str(ROOT))
        (project / "mkdocs.yml").write_text(config)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(project / "mkdocs.yml")]
        done = subprocess.run(command, cwd=project, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout}{done.stderr}")
        rank_search(project / "site" / "search.json")
        shutil.copytree(project / "site", folder, dirs_exist_ok=True)


def rank_search(index: Path) -> None:
    """Rewrite the search index so that the page on a subject comes before its mentions.

    The search prefers early words of titles, and then the order of the index. So the title of a page begins with its
    name in the navigation, the title of a Python object is its full name, and pages come in the order of the
    navigation, other files last.
    """
    content = json.loads(index.read_text())
    names = _navigation()
    found = {staged_name(path).removesuffix("index.md").removesuffix(".md"): path for path in names}
    order = {path: place for place, path in enumerate(names)}
    for item in content["items"]:
        page, _, anchor = item["location"].partition("#")
        path = found.get(page.strip("/"), "")
        if anchor.startswith("megagrpo."):
            item["title"] = anchor
        elif not anchor and path and not item["title"].startswith(names[path]):
            item["title"] = f"{names[path]}: {item['title']}"
        elif not anchor and not path:
            item["title"] = f"{item['location'].strip('/')}: {item['title']}"
        item["order"] = order.get(path, len(order))
    content["items"].sort(key=lambda item: item.pop("order"))
    index.write_text(json.dumps(content))


def markdown_pages() -> list[str]:
    """Every page below docs/, as a path from the root of the repository."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def navigation() -> list[str]:
    """The pages that the navigation names, in its order."""
    return list(_navigation())


@functools.cache
def _navigation() -> dict[str, str]:
    """The pages that the navigation names -> their titles there."""
    found: dict[str, str] = {}
    paths = {staged: path for path, staged in FRONT.items()}

    def collect(entry: object) -> None:
        for name, part in entry.items() if isinstance(entry, dict) else ():
            if isinstance(part, str):
                found[paths.get(part, part)] = name
            collect(part)
        for part in entry if isinstance(entry, list) else ():
            collect(part)

    collect(yaml.safe_load(CONFIG.read_text())["nav"])
    return found


def _text(path: str, root: Path) -> str:
    """The Markdown of a page; of a folder its list of files; of another file its text as code."""
    source = root / path
    if source.is_dir():
        files = sorted(file.name for file in source.iterdir() if file.is_file())
        return "\n".join([f"# {path}", "", *(f"- [{name}]({source.name}/{name})" for name in files)]) + "\n"
    text = source.read_text()
    if path.endswith(".md"):
        return text
    fence = max(["```", *(found + "`" for found in re.findall(r"`{3,}", text))], key=len)
    return f"# {path}\n\n{fence}{_LANGUAGES.get(source.suffix, 'text')}\n{text.rstrip()}\n{fence}\n"


def _without_search(path: str, text: str) -> str:
    """Pages that show a file are not searched."""
    return text if path.endswith(".md") else f"---\nsearch:\n  exclude: true\n---\n\n{text}"


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    """`text` after `change`, which sees a mark in place of each piece of code."""
    code = [found[0] for found in _CODE.finditer(text)]
    marks = iter(range(len(code)))
    changed = change(_CODE.sub(lambda _: f"\0{next(marks)}\0", text))
    return re.sub(r"\0(\d+)\0", lambda mark: code[int(mark[1])], changed)


def _relative(target: PurePosixPath, folder: PurePosixPath) -> str:
    return target.relative_to(folder, walk_up=True).as_posix()


def _is_address(target: str) -> bool:
    return target.startswith(("https://", "http://", "mailto:"))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("-"):
        print(__doc__)
        sys.exit()
    OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    build(OUT)
    print(f"site in {OUT}; python -m http.server -d {OUT} shows it")
