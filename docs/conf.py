"""The site: Markdown pages, and a reference that is made from the code while it is built (`generated.py`)."""

import builtins
import inspect
import re
import sys
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parents[1]))

from docs import generated
from towpath import errors

project = "towpath"
copyright = "towpath contributors"  # noqa: A001  the name Sphinx reads
release = installed("towpath")
version = release

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"towpath {release}"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True}

myst_heading_anchors = 3
highlight_language = "text"
default_role = "code"

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Nothing is fetched, so other projects' names lead nowhere; ours all do, but for those that are not public.
nitpick_ignore_regex = [(r"py:.*", r"(?!towpath\.).*"), (r"py:.*", generated.INTERNAL)]

_MADE_BY_THE_ENGINE = {
    *("Attempt", "Batch", "Call", "Message", "OnceCall", "SyncCall", "SyncTaskHandle", "SyncTx"),
    *("Task", "TaskHandle", "Tx"),
}
_ERRORS = {
    name: cls
    for name, cls in vars(errors).items()
    if inspect.isclass(cls) and issubclass(cls, errors.TowpathError)
}
_ERROR_NAME = re.compile(rf"(?<![\w`.])({'|'.join(_ERRORS)})(?![\w`])")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def _include_generated(_: Sphinx, _page: str, source: list[str]) -> None:
    source[0] = generated.filled(source[0])


def _from_markdown(_: Sphinx, _what: str, _name: str, _thing: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings have Markdown's fences, and name errors as plain words."""

    def block(match: re.Match[str]) -> str:
        body = "\n".join(f"    {line}" for line in match[3].splitlines())
        return f"{match[1]}.. code-block:: {match[2] or 'text'}\n\n{body}\n"

    text = _FENCE.sub(block, "\n".join(lines))
    lines[:] = _ERROR_NAME.sub(r":py:exc:`~towpath.errors.\1`", text).split("\n")


def _without_constructor(
    _: Sphinx, what: str, _name: str, thing: Any, *_rest: Any
) -> tuple[str, None] | None:
    """What the engine makes has no signature for users."""
    return ("", None) if what == "class" and thing.__name__ in _MADE_BY_THE_ENGINE else None


def _unlink_builtins(_: Sphinx, page: nodes.document) -> None:
    """Else `type` in a signature leads to `Message.type`, and `list` to `tasks.list`."""
    for reference in list(page.findall(addnodes.pending_xref)):
        if reference["refdomain"] == "py" and reference["reftarget"] in vars(builtins):
            reference.replace_self(nodes.Text(reference.children[0].astext()))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", _without_constructor)
    app.connect("source-read", _include_generated)
    app.connect("autodoc-process-docstring", _from_markdown)
    app.connect("doctree-read", _unlink_builtins)
