"""The one exception that emend raises on purpose, and what a call with the wrong arguments is told."""
import ast
import difflib
import functools
import operator
import re


class Error(RuntimeError):
    """kind is a word that programs branch on: "invalid argument", "not found", "corruption", "unsupported",
    "input/output", "device", "numeric" or "cancelled". The text has four parts: where, got, expected, advice (the last
    two may be empty)."""

    def __init__(self, text, kind="", where="", got="", expected="", advice=""):
        super().__init__(text)
        self.kind = kind
        self.where = where
        self.got = got
        self.expected = expected
        self.advice = advice


class ArgumentError(Error, TypeError):
    """A TypeError too, as Python has it for calls."""


def _whole(value):
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _plain(value):
    return isinstance(value, (list, tuple)) or hasattr(value, "tolist")


# What the binding calls a type, in our words, and whether a value is one.
_KINDS = [(r"(?:typing\.)?(?:SupportsInt|SupportsIndex)|int", "a whole number", _whole),
          (r"(?:typing\.)?SupportsFloat|float", "a number", lambda value: hasattr(value, "__float__")),
          (r"bool", "True or False", lambda value: isinstance(value, bool)),
          (r"str", "a text", lambda value: isinstance(value, str)),
          (r".*PathLike.*", "a path", lambda value: isinstance(value, str) or hasattr(value, "__fspath__")),
          (r".*(?:Sequence|[Ll]ist)\[str\]", "a list of texts", lambda value: _plain(value) and all(isinstance(each, str) for each in value)),
          (r".*(?:Sequence|[Ll]ist)\[.*(?:int|SupportsInt|SupportsIndex).*\]", "a list of whole numbers",
           lambda value: _plain(value) and all(map(_whole, value))),
          (r".*[Cc]allable.*", "a function", callable),
          (r"dict.*", "a dict", lambda value: isinstance(value, dict)),
          (r"torch\.Tensor", "a torch.Tensor", lambda value: type(value).__name__ in ("Tensor", "Parameter")),
          (r"emend\._emend\.(\w+)", None, lambda value: type(value).__module__ == "emend._emend")]


def _kind(kind):
    """Its words, and a function that says whether a value is one; None where it can be anything."""
    optional = re.fullmatch(r"(?:typing\.)?Optional\[(.*)\]|(.*) \| None", kind)
    if optional:
        words, fits = _kind(optional[1] or optional[2]) or (None, None)
        return words and (words + " or None", lambda value: value is None or fits(value))
    for pattern, words, fits in _KINDS:
        if re.fullmatch(pattern, kind):
            name = kind.rpartition(".")[2]
            return (words, fits) if words else (f"emend.{name}", lambda value: type(value).__name__ == name)
    return None


def _arguments(signature):
    """(name, type, has a default, by keyword only) of each, from the line that the binding begins a docstring with."""
    taken = ast.parse(f"def {signature}: pass").body[0].args
    places = taken.posonlyargs + taken.args
    defaults = [None] * (len(places) - len(taken.defaults)) + taken.defaults + taken.kw_defaults
    return [(each.arg, ast.unparse(each.annotation), default is not None, each in taken.kwonlyargs)
            for each, default in zip(places + taken.kwonlyargs, defaults)]


def _places(arguments):
    """The names of the arguments that can be given by position."""
    return [name for name, _, _, by_name in arguments if not by_name]


def _by_name(arguments, given, named):
    return {**dict(zip(_places(arguments), given)), **named}


def _as_lists(arguments, given, named):
    """The arguments with plain lists where lists of whole numbers are taken and tensors or arrays were given, and
    whether there were any."""
    kinds = {name: _kind(kind) for name, kind, *_ in arguments}
    changed = []

    def plain(name, value):
        if not kinds.get(name) or not kinds[name][0].startswith("a list of whole numbers") or not hasattr(value, "tolist"):
            return value
        changed.append(name)
        return value.tolist()

    places = _places(arguments)
    return (*map(plain, places, given), *given[len(places):]), {name: plain(name, value) for name, value in named.items()}, changed


def _shown(value):
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _half(value):
    """The first text in a value that no UTF-8 has: one with a lone surrogate."""
    for text in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            return text
    return None


def _explanation(where, arguments, given, named, others=False):
    """What is wrong with a call that the binding refused; whether it takes others by name than its signature tells."""
    told = lambda got, expected, advice="": ArgumentError("; ".join(filter(None, (f"{where}: {got}", f"expected {expected}", advice))),
                                                       "invalid argument", where, got, expected, advice)
    names = [name for name, *_ in arguments]
    for name in named:
        if name not in names and not others:
            close = difflib.get_close_matches(name, names, 1)
            return told(f'no argument "{name}"', ", ".join(names) or "none", f'did you mean "{close[0]}"?' if close else "")
    places = _places(arguments)
    if len(given) > len(places):
        return told(f"{len(given)} arguments by position", f"at most {len(places)}" + (f" ({', '.join(places)})" if places else ""),
                    "give the others by name")
    values = _by_name(arguments, given, named)
    for name, kind, optional, _ in arguments:
        words, fits = _kind(kind) or (name, None)
        if name not in values and not optional:
            return told(f"{name} is missing", words)
        if name in values and fits and not fits(values[name]):
            return told(f"{name} is {_shown(values[name])}", words)
    for name, value in values.items():
        if (half := _half(value)) is not None:
            return told(f"{name} holds a lone surrogate: {_shown(half)}", "whole characters",
                        'text.encode("utf-8", "replace").decode() replaces the halves')
    whole = {name: value for name, value in values.items() if isinstance(value, int)}
    numbers = {name: value for name, value in whole.items() if not 0 <= value < 2**63} or whole or values
    return told(", ".join(f"{name} is {_shown(value)}" for name, value in numbers.items()), "values within their range")


def _cut(value):
    """Whether the binding would take a number and leave out what is behind its point: it refuses Python's floats alone."""
    if isinstance(value, (list, tuple)) or (hasattr(value, "tolist") and getattr(value, "ndim", 0) > 0):
        return any(map(_cut, value))
    return hasattr(value, "__int__") and not isinstance(value, float) and not _whole(value)


def _explained(function, where, method):
    @functools.cache  # read when it is first called
    def told():
        """Its arguments, the names of those that hold whole numbers, and whether it takes others by name."""
        signature = function.__doc__.split("\n")[0]
        several = "(*args, **kwargs)" in signature  # forms, of which one may take what the first does not
        if several:
            signature = re.search(r"1\. (.*)", function.__doc__)[1]
        arguments = _arguments(signature)[method:]
        whole = [] if several else [name for name, kind, *_ in arguments if "whole number" in (_kind(kind) or [""])[0]]
        return arguments, whole, "**kwargs" in signature

    @functools.wraps(function)
    def call(*given, **named):
        arguments, whole, others = told()
        values = _by_name(arguments, given[method:], named)
        if any(_cut(values[name]) for name in whole if name in values):
            raise _explanation(where, arguments, given[method:], named)
        try:
            return function(*given, **named)
        except TypeError as error:
            own = error.__traceback__.tb_next is None  # not of a function of the caller's that was called meanwhile
            if not own or not re.search(r"incompatible (function|constructor) arguments", str(error)):
                raise
        plain, by_name, changed = _as_lists(arguments, given[method:], named)
        if changed:
            return call(*given[:method], *plain, **by_name)
        raise _explanation(where, arguments, given[method:], named, others)
    return call


def explain_calls(module):
    """Every function and method of the binding says in one sentence what is wrong with its arguments."""
    for name, value in list(vars(module).items()):
        if not isinstance(value, type):
            if callable(value):
                told = _explained(value, name, 0)
                told.__module__, told.__qualname__ = "emend", name  # where pickle finds it
                setattr(module, name, told)
        elif not issubclass(value, BaseException):
            for member, method in list(vars(value).items()):
                public = member in ("__init__", "__getitem__") or not member.startswith("_")
                # A class that is not made by calls has Python's own __init__, whose docstring is no signature.
                if callable(method) and public and method.__doc__.startswith(member + "("):
                    where = name if member == "__init__" else (f"{name}[...]" if member == "__getitem__" else f"{name}.{member}")
                    setattr(value, member, _explained(method, where, 1))
