"""Chat templates, rendered so that a hostile one can only fail.

A template is a program from a file. Here it works on plain data alone, and only listed names exist for it: the
attributes and methods of texts, lists, mappings, loops and namespaces that real templates use, a few functions, filters
and tests. Everything it does is paid for (``jaxdecode.text.budget``): the syntax tree is rewritten so that also what
Jinja would compile to bare Python (loops, slices, ``~``, comparisons, literals, output) goes through a price.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jinja2 import Template, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import LoopContext, Macro, Undefined
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from jaxdecode.checks import shorten
from jaxdecode.text import budget

__all__ = ["render"]

_LONGEST = 1 << 17  # characters of a template; the longest published ones have a fifth of it
_DATE = re.compile(r"(?:[^%]|%-?[A-Za-z%]){0,64}")
_LOOP = "index index0 revindex revindex0 first last length previtem nextitem depth depth0 cycle changed"
_LOOP_NAMES = frozenset(_LOOP.split())

# The statements and expressions of a template that stands alone.
_STATEMENTS = "Template Output TemplateData For If Macro CallBlock FilterBlock With Assign AssignBlock Break Continue"
_NAMES = "Name NSRef Const Tuple List Dict Pair Keyword Getattr Getitem Slice Call Filter Test"
_OPERATORS = "Add Sub Mul Div FloorDiv Mod Pow Concat And Or Not Neg Pos Compare Operand CondExpr"
_NODES = frozenset(f"{_STATEMENTS} {_NAMES} {_OPERATORS}".split())

# Filters and tests by what they do to their arguments: touch the items of a list, go all through them, both, neither.
_SHALLOW_FILTERS = "items list map reject rejectattr reverse select selectattr"
_DEEP_FILTERS = "capitalize dictsort float int lower string trim upper"
_ORDERING_FILTERS = "max min sort title unique"
_FREE_FILTERS = "count d default first last length"
_FREE_TESTS = "boolean defined false float integer iterable mapping none number sequence string true undefined"
_DEEP_TESTS = "== != < <= > >= eq equalto ne lt le gt ge lessthan greaterthan in lower upper"


def render(template: str, **variables: Any) -> str:
    """The text that ``template`` makes of ``variables``, which must be plain data.

    ValueError if it is malformed, refuses, breaks out, or goes on for too long. A template that asks whether
    ``strftime_now`` is defined is told that it is not, so that the same chat gives the same text every day; one that
    needs the date has it.
    """
    if len(template) > _LONGEST:
        raise ValueError(f"chat template: expected at most {_LONGEST} characters, got {len(template)}")
    try:
        with budget.limited(variables):
            return "".join(_compiled(template).generate(**variables))
    except budget.Exhausted as error:
        raise ValueError(f"chat template: {error}") from None
    except Exception as error:  # a template can fail in any way; the caller needs to know only that it did
        raise ValueError(f"chat template: {type(error).__name__}: {shorten(error)}") from None


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    environment = _environment()
    available = {} if f"{_NOW} is defined" in template else {_NOW: _today}
    code = environment.compile(_rewritten(environment, environment.parse(template)))
    return Template.from_code(environment, code, environment.make_globals(available))


class _Environment(SandboxedEnvironment):
    """Attributes, calls and operators of templates: what is listed, after its price."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, Namespace):
            return not attr.startswith("_")
        return attr in (_LOOP_NAMES if isinstance(obj, LoopContext) else budget.METHODS.get(type(obj), ()))

    def is_safe_callable(self, obj: Any) -> bool:
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, LoopContext):
            return obj.__name__ in _LOOP_NAMES
        if type(owner) in budget.METHODS:
            return obj.__name__ in budget.METHODS[type(owner)]
        return isinstance(obj, LoopContext | Macro | Undefined) or any(obj is f for f in _FUNCTIONS.values())

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        raise SecurityError(f"{type(obj).__name__}.{attribute} is not for templates")

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            budget.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        return budget.binary(operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget.pay(1 + len(args) + len(kwargs))
        owner = getattr(__obj, "__self__", None)
        if type(owner) in budget.METHODS and __self.is_safe_callable(__obj):
            budget.pay_method(owner, __obj.__name__, args, _without_scopes(kwargs))
        elif not isinstance(__obj, Macro | Undefined):
            for arg in args:
                budget.weigh(arg)
        return budget.made(super().call(__context, __obj, *args, **kwargs))


class _Generation(Extension):
    """``{% generation %}``: marks what a model wrote, for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@pass_context
def _written(context: Any, value: Any) -> Any:
    # Asking for the context keeps Jinja from calling this while it compiles, when there is no budget.
    budget.weigh(value)
    return value


@functools.cache
def _environment() -> _Environment:
    """The one environment of all templates."""
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _Generation],
        finalize=_written,
        optimized=False,
    )
    made.globals = {name: function for name, function in _FUNCTIONS.items() if name != _NOW}
    made.filters, made.tests = _filters(made.filters), _tests(made.tests)
    return made


def _without_scopes(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments without the two that Jinja's compiler adds."""
    return {key: value for key, value in kwargs.items() if key not in ("_loop_vars", "_block_vars")}


def _rewritten(environment: Any, tree: Any) -> Any:
    """The syntax tree in which whatever bypasses the environment goes through a filter that takes the price."""

    def through(name: str, node: Any) -> Any:
        made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        return made.set_environment(environment)

    def paid(name: str, node: Any) -> Any:
        return node if isinstance(node, nodes.Const) else through(name, node)

    class Rewriter(NodeTransformer):
        def generic_visit(self, node: Any, *args: Any, **kwargs: Any) -> Any:
            if type(node).__name__ not in _NODES:
                raise SecurityError(f"expected a template that stands alone, got {type(node).__name__.lower()}")
            node = super().generic_visit(node, *args, **kwargs)
            for more in ("dyn_args", "dyn_kwargs"):  # what a call spreads out
                if getattr(node, more, None) is not None:
                    setattr(node, more, through(".listed", getattr(node, more)))
            if isinstance(node, nodes.For):
                node.iter = through(".listed", node.iter)
            elif isinstance(node, nodes.TemplateData):
                node = through(".text", nodes.Const(node.data, lineno=node.lineno))
            elif isinstance(node, nodes.Concat):
                node = through(".concat", nodes.List(node.nodes, lineno=node.lineno))
            elif isinstance(node, nodes.Compare | nodes.Operand):
                node.expr = paid(".scanned", node.expr)
            elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
                node.node = through(".copied", node.node)
            elif isinstance(node, nodes.Pair):
                node.key = paid(".weighed", node.key)
            elif isinstance(node, nodes.List | nodes.Dict) or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
                node = through(".made", node)
            return node

    return Rewriter().visit(tree)


def _filters(jinja: dict[str, Any]) -> dict[str, Any]:
    found = {name: _guarded(jinja[name], budget.listed) for name in _SHALLOW_FILTERS.split()}
    found |= {name: _guarded(jinja[name], budget.weigh) for name in _DEEP_FILTERS.split()}
    found |= {name: _guarded(jinja[name], budget.listed, budget.weigh) for name in _ORDERING_FILTERS.split()}
    found |= {name: _guarded(jinja[name]) for name in _FREE_FILTERS.split()}
    found |= {"tojson": _to_json, "replace": _replace, "indent": _indent, "round": _round, "abs": _abs, "safe": _same}
    found |= {"join": _join}
    return found | {
        ".text": _same,
        ".concat": _concat,
        ".made": budget.made,
        ".copied": budget.copied,
        ".listed": budget.listed,
        ".scanned": budget.scanned,
        ".weighed": budget.weighed,
    }


def _tests(jinja: dict[str, Any]) -> dict[str, Any]:
    found = {name: _guarded(jinja[name]) for name in _FREE_TESTS.split()}
    found |= {name: _guarded(jinja[name], budget.weigh) for name in _DEEP_TESTS.split()}
    return found | {"odd": _odd, "even": _even, "divisibleby": _divisible}


def _guarded(function: Any, *prices: Callable[[Any], Any]) -> Any:
    """A filter or test of Jinja's behind prices: ``listed`` for its first argument, others for all of them.

    What it makes lazily becomes a list.
    """
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # it is handed the environment, or the like, before them

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        budget.pay()
        for price in prices:
            for value in args[first : first + 1] if price is budget.listed else (*args[first:], *kwargs.values()):
                price(value)
        result = function(*args, **kwargs)
        return budget.listed(result) if isinstance(result, Iterator) else budget.made(result)

    return guarded


def _same(value: Any) -> Any:
    return value


def _concat(values: list[Any]) -> str:
    budget.weigh(values)
    return "".join([str(value) for value in values])


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which models were not trained on.
    budget.weigh((value, separators))
    small = (indent is None or 0 <= indent <= 16) and all(len(s) <= 16 for s in separators or ())
    if not small:
        raise ValueError("tojson: expected an indent and separators of at most 16 characters, got larger ones")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return "".join(budget.made(piece) for piece in encoder.iterencode(value))


def _replace(value: Any, old: Any, new: Any, count: int = -1) -> str:
    budget.weigh((value, old, new))
    text, args = str(value), (str(old), str(new))
    budget.pay_method(text, "replace", args, {})
    return text.replace(*args, count)


def _join(value: Any, d: Any = "", attribute: str | int | None = None) -> str:
    items = budget.listed(value)
    if attribute is not None:
        items = [functools.reduce(_environment().getitem, str(attribute).split("."), item) for item in items]
    budget.weigh((items, d))
    separator = str(d)
    budget.pay(1, len(items) * len(separator))
    return separator.join([str(item) for item in items])


def _indent(value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    budget.weigh((value, width))
    text = str(value)
    budget.pay_method(text, "splitlines", (), {})
    lines = text.splitlines()
    budget.pay(1, len(lines) * (len(width) if isinstance(width, str) else width))
    space = width if isinstance(width, str) else " " * width
    shifted = [space + line if (line or blank) and (i or first) else line for i, line in enumerate(lines)]
    return "\n".join(shifted)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    known = method == "common" and abs(precision) < 16 and isinstance(value, int | float)
    if not known:
        raise ValueError(f"round: expected a number, under 16 digits, the common method; got {precision!r}, {method!r}")
    return round(value, precision)


def _abs(value: float) -> float:
    return abs(value)


def _whole(value: Any) -> int:
    if not isinstance(value, int):  # a text would be taken for a format
        raise TypeError(f"expected a whole number, got a {type(value).__name__}")
    return value


def _odd(value: int) -> bool:
    return _whole(value) % 2 == 1


def _even(value: int) -> bool:
    return _whole(value) % 2 == 0


def _divisible(value: int, by: int) -> bool:
    return _whole(value) % _whole(by) == 0


def _range(*args: int) -> list[int]:
    numbers = range(*(_whole(arg) for arg in args))
    budget.pay(len(numbers))
    return list(numbers)


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _today(form: str) -> str:
    if _DATE.fullmatch(form) is None:
        raise ValueError("strftime_now: expected a short format of plain directives, got another one")
    return datetime.datetime.now().strftime(form)


_NOW = "strftime_now"
_FUNCTIONS: dict[str, Any] = {
    "range": _range,
    "dict": dict,
    "namespace": Namespace,
    "raise_exception": _refuse,
    _NOW: _today,
}
