"""Pages for people: one HTML file that loads nothing, light or dark, on a desktop or a telephone.

Jinja2 and Matplotlib make them. They come with the extra ``mgpu-check[report]``, and are imported when a page is made.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "INSTALL", "SERIES", "colour", "drawing", "inline", "render", "require"]

INSTALL = "pip install 'mgpu-check[report]'"
SERIES = 8
"""So many colours there are for curves: "series0", "series1", ..."""
COLOURS = (
    "text",
    "weak",
    "grid",
    "ground",
    "panel",
    "wrong",
    "right",
    "unsure",
    *(f"series{n}" for n in range(SERIES)),
)
"""Names of colours: variables of the style sheet, which gives each one a value for light and one for dark ground."""

_NEEDED = ("jinja2", "matplotlib")
_NAMESPACES = ("{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}")
_OF_MATPLOTLIB = re.compile(r"(?:[A-Za-z0-9.]+_\d+|[mpCDh][0-9a-f]{10,})$")  # an id that it has made itself


def require(what: str) -> None:
    """Check that pages can be made.

    Args:
        what: the option that asks for one, as the message names it.

    Raises:
        ValueError: the extra is not installed.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ValueError(f"{what} needs {' and '.join(missing)}, not installed here; do: {INSTALL}")


def render(template: Path, *, version: str, **values: object) -> str:
    """Fill a template, which extends ``pages.html`` beside this file; what is put in is escaped, but for `inline` figures.

    Args:
        version: of mgpu-check, which stands at the end of the page.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name).render(version=version, **values) + "\n"


def colour(name: str) -> str:
    """Return what Matplotlib is to be given for one of `COLOURS`; in the page it is the variable of that name."""
    return f"#fe01{COLOURS.index(name):02x}"


@contextmanager
def drawing() -> Iterator[None]:
    """Give the look of the page to figures that are made and turned into SVG within the context. A unit of their size is a pixel."""
    import matplotlib as mpl

    ink, weak = colour("text"), colour("weak")
    settings = {
        "svg.fonttype": "none",  # text stays text: it can be found, copied and read aloud
        "svg.hashsalt": "mgpu-check",
        "figure.dpi": 72,
        "font.family": "DejaVu Sans",  # comes with Matplotlib; wider than what browsers take, so nothing overlaps there
        "font.size": 12,
        "axes.titlesize": 13,
        "axes.labelsize": 12,
        "xtick.labelsize": 12,
        "ytick.labelsize": 12,
        "legend.fontsize": 12,
        "legend.frameon": False,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.edgecolor": weak,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.unicode_minus": False,
        "grid.color": colour("grid"),
        "xtick.color": weak,
        "ytick.color": weak,
        "xtick.labelcolor": ink,
        "ytick.labelcolor": ink,
    }
    with mpl.rc_context(settings):  # type: ignore[arg-type]  # its keys are literals there
        yield


def inline(figure: Figure, name: str, title: str) -> str:
    """Return a figure as an ``<svg>`` element that stands in a page.

    What an artist has as its ``gid`` is its class there.

    Args:
        figure: made within `drawing`, its size in inches of 72 pixels.
        name: with which its ids begin; other than those of all other figures of the page.
        title: for those who cannot see it.
    """
    from markupsafe import Markup

    written = io.StringIO()
    figure.savefig(written, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    root = ET.fromstring(written.getvalue())
    for parent in root.iter():
        for child in list(parent):
            if child.tag.endswith(("}metadata", "}style")):  # a style in a page would be one of the whole page
                parent.remove(child)
    ids = {element.get("id", ""): "" for element in root.iter() if element.get("id")}
    ids = {old: f"{name}-{number}" for number, old in enumerate(ids)}
    referenced = set(re.findall(r'(?:href="|url\()#([^")]+)', written.getvalue()))
    for element in root.iter():
        _settle(element, ids, referenced)
    across, down = (round(72 * size) for size in figure.get_size_inches())
    root.attrib = {
        "xmlns": _NAMESPACES[0].strip("{}"),
        "viewBox": root.attrib["viewBox"],
        "role": "img",
        "style": f"max-width: {across}px; min-width: {round(0.8 * across)}px; aspect-ratio: {across} / {down}",
    }
    named = ET.Element("title")
    named.text = title
    root.insert(0, named)
    return Markup(ET.tostring(root, encoding="unicode"))


def _settle(element: ET.Element, ids: dict[str, str], referenced: set[str]) -> None:
    """Make an element of Matplotlib's one of the page: its ids, its class, its colours."""
    for namespace in _NAMESPACES:
        element.tag = element.tag.removeprefix(namespace)
    attributes = {key.removeprefix(_NAMESPACES[1]): value for key, value in element.attrib.items()}
    identity = attributes.pop("id", "")
    if identity in referenced:
        attributes["id"] = ids[identity]
    elif identity and not _OF_MATPLOTLIB.match(identity):
        attributes["class"] = identity
    for key, value in attributes.items():
        value = re.sub(r"(?<=^#).+|(?<=url\(#)[^)]+", lambda match: ids.get(match[0], match[0]), value)
        value = re.sub("#fe01([0-9a-f]{2})", lambda match: f"var(--{COLOURS[int(match[1], 16)]})", value)
        attributes[key] = re.sub(r"font-family:[^;]*;? ?", "", value)
    element.attrib = attributes
