"""A page as a browser would read it: a tree of elements, their texts, and nothing forgiven."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

_VOID = {"meta", "br"}


@dataclass(slots=True)
class Element:
    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def all(self, name: str | None = None, *, style: str | None = None) -> Iterator[Element]:
        """Every element in here with that name and class, in the order of the page."""
        for child in self.children:
            if isinstance(child, Element):
                styles = child.attributes.get("class", "").split()
                if name in (None, child.name) and (style is None or style in styles):
                    yield child
                yield from child.all(name, style=style)

    def one(self, name: str | None = None, *, id_: str) -> Element:
        [found] = [each for each in self.all(name) if each.attributes.get("id") == id_]
        return found

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("document", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute twice in <{tag}>"
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(element)
        if tag not in _VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> closes <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read_page(text: str) -> Element:
    """The document; an element that is not closed, or closed by another's end, is a failed assertion."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].name}> is not closed"
    return reader.open[0]
