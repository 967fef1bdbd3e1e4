"""The documentation and the code say the same, and what the documentation points at is there."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from muster.events import Event

ROOT = Path(__file__).parents[2]
MARKDOWN = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = generate().pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_is_made_from_the_code_is_as_the_code_makes_it(page: Path) -> None:
    assert page.read_text() == PAGES[page], "run: python docs/generate.py"


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to headings."""
    heads = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    lost = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            lost += [link]
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            lost.append(link)
    assert not lost


def test_every_page_of_the_shelves_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link.partition("#")[0]).resolve() for link in LINK.findall(index.read_text())}
    assert not [page for page in ROOT.glob("docs/**/*.md") if page != index and page.resolve() not in linked]


def test_the_chinese_readme_keeps_step_with_the_english_one() -> None:
    english, chinese = (ROOT / name for name in ("README.md", "README.zh-CN.md"))
    assert outline(english.read_text()) == outline(chinese.read_text())
    ours, theirs = (targets(page.read_text()) for page in (english, chinese))
    assert ours - {"README.zh-CN.md"} == theirs - {"README.md"}


def outline(text: str) -> tuple[list[int], list[list[str]]]:
    """Levels of the headings, and code blocks without their comments, which are translated."""
    blocks = [re.sub(r" *#.*", "", block).splitlines() for block in FENCE.findall(text)]
    return [len(found) for found in re.findall(r"^(#+) ", FENCE.sub("", text), re.MULTILINE)], blocks


def targets(text: str) -> set[str]:
    return set(LINK.findall(FENCE.sub("", text)))


def test_the_page_on_events_has_every_event_and_its_fields() -> None:
    page = (ROOT / "docs" / "reference" / "events.md").read_text()
    for name, kind in Event.kinds.items():
        if name == "TaskEvent":
            continue
        row = next((line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line), "")
        fields = {field.name for field in dataclasses.fields(kind)} - {"at", "task", "attempt"}
        assert row and not [field for field in fields if f"`{field}`" not in row], name


def test_the_page_on_python_has_every_public_name() -> None:
    import muster

    page = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    assert not [name for name in muster.__all__ if not name.startswith("_") and f"muster.{name}" not in page]


@pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_in_the_documentation_is_python(page: Path) -> None:
    for block in re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, str(page), "exec")
