"""Pages of HTML that need nothing but themselves: one frame, one style and one form of table for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

_SHARED = "thinwire.launch.shared"


def render(package: str, template: str, brand: str, title: str, **values: Any) -> str:
    """A page from a template in the folder `templates` of `package`; it extends page.html.

    Args:
        package: the package with the template.
        template: the file's name.
        brand: the kind of page, as a reader knows it.
        title: the heading of this page.
        values: the values for the template.
    """
    return _environment(package).get_template(template).render(brand=brand, title=title, **values)


def _environment(package: str) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name, "templates") for name in (package, _SHARED)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["svg"] = Markup  # only for pictures of ours, which escape all text
    return environment
