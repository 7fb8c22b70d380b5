"""Every public symbol of the installed headers says what it is.

Types, functions and member functions need a comment: before the declaration, behind it (///<), or before the first of a
group of declarations that follow each other without a blank line. A plain struct or enum may say it at its members. What
a name and a type tell completely needs none: special members, overriding functions, operators, and readers in one line
(`width() const { return width_; }`). Overloads share a comment, and so do a type and the functions right behind it.

usage: api_docs.py SOURCE_FOLDER [--list]
"""
import pathlib
import re
import sys

FOLDERS = ["core", "devices", "hparams", "datasets", "hooks", "models", "editors", "evaluation", "workflow"]


def blank_strings(line):
    return re.sub(r'"(\\.|[^"\\])*"', '""', re.sub(r"'(\\.|[^'\\])'", "' '", line))


def without_templates(text):
    """std::function<bool(int)> f -> std::function f"""
    while (shorter := re.sub(r"<[^<>]*>", "", text)) != text:
        text = shorter
    return text


class Header:
    """Walks through a header line by line and keeps the scopes that are open."""

    def __init__(self, path):
        self.path, self.problems, self.symbols = path, [], 0
        self.scopes = []  # (kind, name, public)
        self.documented = False  # a comment stands before what comes next, or before the group it belongs to
        self.statement, self.start, self.comment_behind = "", 0, False
        self.pending = None  # a type that has no comment of its own yet
        self.known = set()  # names that have a comment

    def check(self):
        skip_continuation = False
        for number, raw in enumerate(self.path.read_text().splitlines(), 1):
            line = raw.strip()
            if skip_continuation or line.startswith("#"):
                skip_continuation = line.endswith("\\")
                continue
            if not self.statement:
                if line.startswith(("///", "//")):
                    self.documented, self.pending = True, None
                    continue
                if not line:
                    self.documented = False
                    continue
                self.start = number
            code, _, comment = blank_strings(line).partition("//")
            self.comment_behind |= comment.startswith("/<") or (bool(comment) and bool(code.strip()))
            if self.pending and comment:
                self.pending = None  # the type says it at a member
            self.feed(code)
        return self

    def feed(self, code):
        for character in code + " ":
            if character == "{":
                self.open()
            elif character == "}":
                self.close()
            elif character == ";" and not self.inside_body():
                self.declare(self.statement)
                self.reset()
            elif character == ":" and re.fullmatch(r"\s*(public|private|protected)", self.statement):
                kind, name, _ = self.scopes.pop()
                self.scopes.append((kind, name, self.statement.strip() == "public"))
                self.reset()
                self.documented = False
            elif not self.inside_body():
                self.statement += character
        self.statement = self.statement if self.statement.strip() else ""

    def reset(self):
        self.statement, self.comment_behind = "", False

    def inside_body(self):
        return bool(self.scopes) and self.scopes[-1][0] == "body"

    def public(self):
        return all(public for _, _, public in self.scopes) and not any("detail" in name for _, name, _ in self.scopes)

    def open(self):
        text = self.statement.strip()
        if self.inside_body():
            self.scopes.append(("body", "", True))
        elif match := re.match(r"(?:inline )?namespace(?: ([\w:]+))?$", text):
            self.scopes.append(("namespace", match.group(1) or "detail", True))
            self.reset()
            self.documented = False
        elif match := re.match(r"(?:template ?<.*> ?)?(class|struct|enum(?: class)?) (?:\[\[\w+\]\] )?([\w:<>]+)", text):
            if not (self.documented or self.comment_behind) and self.public():
                self.pending = f"{self.path}:{self.start}: {match.group(1)} {match.group(2)}"
            else:
                self.require(match.group(1) + " " + match.group(2))
            kind = "enum" if match.group(1).startswith("enum") else "type"
            self.scopes.append(("body" if kind == "enum" else "type", match.group(2), self.public() and True))
            if kind == "type" and match.group(1) == "class":
                self.scopes[-1] = ("type", match.group(2), False)
            self.reset()
        elif re.search(r"=\s*$|\)\s*(const|noexcept|override|final|:.*|,.*|->.*|\s)*$|\w\s*$|,\s*$|\(\s*$", text) or "(" in text:
            # A function's body, an initialiser, a default argument.
            if "(" in text and not re.search(r"=\s*$", text) and text.count("(") == text.count(")"):
                if not re.search(r"\w\([^()]*\) const( noexcept)?$", text):  # a reader
                    self.declare(self.statement)
                self.statement = "\0done"
            self.scopes.append(("body", "", True))
        else:
            self.scopes.append(("body", "", True))

    def close(self):
        if not self.scopes:
            return
        kind, closed, _ = self.scopes.pop()
        if self.pending and not (kind == "body" and self.scopes and self.scopes[-1][0] == "type"):
            self.problems.append(self.pending)
            self.pending = None
        if kind == "body" and not self.inside_body() and self.statement.startswith("\0"):
            self.reset()  # a function with a body ends without a semicolon
        if kind in ("type", "namespace"):
            self.statement = "\0end" if kind == "type" else ""
            self.documented = kind == "type" and not any(name.split(" ")[-1] == closed for name in self.undocumented())

    def undocumented(self):
        return [problem.rsplit(": ", 1)[-1] for problem in self.problems]

    def require(self, what):
        if not self.public():
            return
        self.symbols += 1
        if self.documented or self.comment_behind:
            self.known.add(what)
            self.documented = True  # the rest of the group, too
        elif what not in self.known:
            self.problems.append(f"{self.path}:{self.start}: {what}")

    def declare(self, statement):
        text = " ".join(statement.split())
        if not text or text.startswith("\0"):
            return
        if re.match(r"(using|friend|static_assert|extern|typedef)\b", text) or re.match(r"(class|struct|enum)\b[^(=]*$", text):
            return
        if "= delete" in text or "= default" in text or "~" in text or re.search(r"\b(override|final)\b", text):
            return
        function = re.search(r"([\w~]+|operator[^\s(]+) ?\(", without_templates(re.sub(r"\[\[.*?\]\]|\(\*(\w+)\)\(.*\)", r"\1", text)))
        if "operator" in text:
            return
        if function and f"::{function.group(1)}" in text:
            return  # the definition of what was declared above
        in_type = self.scopes and self.scopes[-1][0] == "type"
        if function and "=" not in text.split(function.group(0))[0]:
            if in_type and function.group(1) == self.scopes[-1][1].split("<")[0]:
                return  # a constructor: the type's comment
            self.require(function.group(1) + "()")


def main():
    top = pathlib.Path(sys.argv[1])
    problems, symbols, headers = [], 0, 0
    for folder in FOLDERS:
        for path in sorted((top / folder).rglob("*.h")):
            if "detail" in path.relative_to(top).parts:
                continue
            header = Header(path).check()
            headers += 1
            symbols += header.symbols
            problems += header.problems
            if not path.read_text().startswith("//"):
                problems.append(f"{path}:1: no comment that says what the header is for")
            if header.scopes:
                problems.append(f"{path}: the check lost its way ({header.scopes})")
    for problem in problems:
        print(problem.replace(str(top) + "/", ""), "is not documented")
    print(f"{headers} headers, {symbols} public types and functions, {len(problems)} without a comment")
    sys.exit(bool(problems) or symbols < 500)


main()
