"""The documentation site builds without a warning, and every link on it leads to a page and an anchor."""

import importlib.util
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

REPOSITORY = Path(__file__).parents[2]


def _site_tool():
    spec = importlib.util.spec_from_file_location("site_tool", REPOSITORY / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = _site_tool()


class Page(HTMLParser):
    """Title, ids, links and loaded files of a built page."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.ids, self.links, self.loaded, self.title = path, set(), [], [], ""
        self._in_title = False
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self._in_title |= tag == "title"
        self.ids.add(values.get("id"))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        if tag in ("script", "img", "iframe", "source") and values.get("src"):
            self.loaded.append(values["src"])
        if tag == "link" and values.get("rel") in ("stylesheet", "preload", "preconnect", "icon", "dns-prefetch"):
            self.loaded.append(values["href"])

    def handle_endtag(self, tag):
        self._in_title &= tag != "title"

    def handle_data(self, data):
        if self._in_title:
            self.title += data


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; the build ends with an error at any warning."""
    folder = tmp_path_factory.mktemp("site")
    TOOL.build(folder)
    return folder


@pytest.fixture(scope="session")
def pages(site):
    return {path: Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def test_every_page_of_the_docs_is_built_and_has_a_title_of_its_own(site, pages):
    for name in [*TOOL.FRONT, *TOOL.markdown_pages()]:
        built = TOOL.staged_name(name).removesuffix(".md")
        path = site / f"{built}.html" if built.endswith("index") else site / built / "index.html"
        assert len(pages[path].title.strip()) > len("megagrpo"), name


def test_every_page_of_the_docs_is_in_the_navigation():
    assert sorted(set(TOOL.markdown_pages()) - set(TOOL.navigation())) == []


def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(site, pages):
    broken = []
    for path, page in pages.items():
        for link in page.links:
            address = urlsplit(link)
            if address.scheme or address.netloc:
                continue
            target = (path.parent / unquote(address.path)).resolve() if address.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                address.fragment and target in pages and unquote(address.fragment) not in pages[target].ids
            ):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_pages_load_nothing_from_another_host(site, pages):
    assert [(str(path), name) for path, page in pages.items() for name in page.loaded if urlsplit(name).netloc] == []
    styles = "\n".join(path.read_text() for path in site.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)\"']*", styles) == []


FIRST = {  # what a reader types into the search -> what must come first
    "learning rate": "docs/config/train/#trainlearning_rate",
    "max_completion_length": "docs/config/rollout/#rolloutmax_completion_length",
    "importance_correction_max": "docs/config/algorithm/#algorithmimportance_correction_max",
    "temperature": "docs/config/rollout/#rollouttemperature",
    "tensor parallel": "docs/config/parallel/#paralleltp",
    "wandb": "docs/config/run/#runwandb",
    "resume": "docs/config/run/#runresume",
    "OOM": "docs/troubleshooting/#cuda-out-of-memory-oom-in-the-trainer-or-vllm",
    "CUDA out of memory": "docs/troubleshooting/#cuda-out-of-memory-oom-in-the-trainer-or-vllm",
    "vllm memory": "docs/troubleshooting/#cuda-out-of-memory-oom-in-the-trainer-or-vllm",
    "hang": "docs/troubleshooting/#vllm-hangs-at-the-start",
    "NaN": "docs/troubleshooting/#nan-loss-nan-gradient-and-exploding-kl",
    "loss is 0": "docs/troubleshooting/#the-loss-is-0",
    "NCCL timeout": "docs/troubleshooting/#nccl-timeout-a-collective-hangs",
    "multi node": "docs/troubleshooting/#multi-node-rendezvous-fails",
    "install": "docs/install/",
    "checkpoint": "docs/checkpoints/",
    "export": "docs/checkpoints/#exporting-a-trained-run",
    "kl": "docs/kl/",
    "lora": "docs/lora/",
    "slurm": "docs/slurm/",
    "evaluation": "docs/evaluation/",
    "notebook": "docs/python/",
    "async": "docs/async/",
    "custom reward": "docs/your_own_task/#a-custom-reward-function",
    "SamplingParams": "docs/api/types/#megagrpo.types.SamplingParams",
}


def test_the_search_of_the_site_finds_the_page_on_a_subject_first(site):
    """The site's own search program runs under Node, with the site's own index."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    (worker,) = site.glob("assets/javascripts/workers/search*.js")
    command = ["node", str(Path(__file__).with_name("site_search.js")), str(worker), str(site / "search.json"), *FIRST]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert {query: locations[:1] for query, locations in zip(FIRST, found, strict=True)} == {
        query: [page] for query, page in FIRST.items()
    }


def test_a_link_with_the_name_of_a_page_shows_its_title(site):
    shown = (site / "docs" / "troubleshooting" / "index.html").read_text()
    assert ">GPUs</a>" in shown and not re.search(r">[\w/]+\.md</a>", shown)


def test_the_site_begins_with_a_page_that_leads_everywhere(site, pages):
    text = (site / "index.html").read_text()
    assert 'class="grid cards"' in text
    assert {"docs/install/", "docs/config/", "docs/troubleshooting/", "overview/"} <= {
        link.removeprefix("./") for link in pages[site / "index.html"].links
    }


def test_the_reference_shows_fields_and_docstrings(site):
    text = (site / "docs" / "api" / "extensions" / "index.html").read_text()
    assert "CallbackControl" in text and "should_training_stop" in text and "What callbacks ask for" in text


def test_a_link_to_a_file_leads_to_a_page_that_shows_it(tmp_path):
    root = _small_repository(tmp_path / "repository")
    TOOL.stage(tmp_path / "pages", ["README.md", "docs/guide.md"], root)
    assert (
        tmp_path / "pages" / "overview.md"
    ).read_text() == "# Home\n\n[guide](docs/guide.md#part) ![plot](docs/plot.svg)\n"
    guide = (tmp_path / "pages" / "docs" / "guide.md").read_text()
    assert (
        "[home](../overview.md) [`config`](../configs/run.yaml.md) [all](../configs/index.md) [web](https://a.b/c.yaml)"
        in guide
    )
    assert "`[code](../configs/run.yaml)`" in guide
    shown = (tmp_path / "pages" / "configs" / "run.yaml.md").read_text()
    assert shown.endswith("# configs/run.yaml\n\n````yaml\na: |\n  ```\n````\n") and "exclude: true" in shown
    assert "[run.yaml](run.yaml.md)" in (tmp_path / "pages" / "configs" / "index.md").read_text()
    assert (tmp_path / "pages" / "docs" / "plot.svg").read_text() == "<svg/>"


def test_a_link_to_a_folder_with_a_readme_leads_to_the_readme(tmp_path):
    root = _small_repository(tmp_path / "repository")
    (root / "configs" / "README.md").write_text("# Configs\n\n[one](run.yaml)\n")
    TOOL.stage(tmp_path / "pages", ["docs/guide.md"], root)
    assert "[all](../configs/index.md)" in (tmp_path / "pages" / "docs" / "guide.md").read_text()
    assert "[one](run.yaml.md)" in (tmp_path / "pages" / "configs" / "index.md").read_text()


def test_a_link_to_a_missing_file_is_an_error(tmp_path):
    root = _small_repository(tmp_path / "repository")
    (root / "docs" / "guide.md").write_text("# Guide\n\n[gone](../configs/gone.yaml)\n")
    with pytest.raises(TOOL.BrokenLink, match=r"docs/guide\.md: \.\./configs/gone\.yaml does not exist"):
        TOOL.stage(tmp_path / "pages", ["docs/guide.md"], root)


def test_a_page_of_the_navigation_that_does_not_exist_is_an_error(tmp_path):
    root = _small_repository(tmp_path / "repository")
    with pytest.raises(TOOL.BrokenLink, match=r"nav names docs/gone\.md"):
        TOOL.stage(tmp_path / "pages", ["docs/gone.md"], root)


def _small_repository(root: Path) -> Path:
    (root / "docs").mkdir(parents=True)
    (root / "configs").mkdir()
    (root / "README.md").write_text("# Home\n\n[guide](docs/guide.md#part) ![plot](docs/plot.svg)\n")
    (root / "docs" / "plot.svg").write_text("<svg/>")
    text = "[home](../README.md) [`config`](../configs/run.yaml) [all](../configs) [web](https://a.b/c.yaml)"
    (root / "docs" / "guide.md").write_text(f"# Guide\n\n{text}\n\n`[code](../configs/run.yaml)`\n\n## Part\n")
    (root / "configs" / "run.yaml").write_text("a: |\n  ```\n")
    return root
