"""A cursor over sqlglot's tokens, for the statements that sqlglot itself does not know."""

from __future__ import annotations

from sqlglot.tokenizer_core import Token, TokenType

from headwater.errors import UsageError


class Cursor:
    """Reads the tokens of one statement from left to right. Keywords compare without case."""

    def __init__(self, text: str, tokens: list[Token]) -> None:
        self.text = text
        self.tokens = tokens
        self.at = 0

    @property
    def done(self) -> bool:
        return self.at >= len(self.tokens)

    def peek(self, ahead: int = 0) -> str:
        index = self.at + ahead
        return self.tokens[index].text.upper() if index < len(self.tokens) else ""

    def next(self) -> Token:
        if self.done:
            raise self.error("the statement ends too early")
        token = self.tokens[self.at]
        self.at += 1
        return token

    def take(self, *words: str) -> bool:
        """Skip these words if they come next."""
        if all(self.peek(i) == word and not self._is_string(i) for i, word in enumerate(words)):
            self.at += len(words)
            return True
        return False

    def expect(self, *words: str) -> None:
        if not self.take(*words):
            raise self.error(f"expected {' '.join(words)}")

    def identifier(self) -> str:
        token = self.next()
        plain = token.text[:1].isidentifier() and token.token_type not in (TokenType.STRING, TokenType.NUMBER)
        if not plain and token.token_type is not TokenType.IDENTIFIER:
            raise self.error(f"expected a name, found {token.text!r}", token)
        if not token.text:
            raise self.error("a name cannot be empty", token)
        return token.text

    def string(self) -> str:
        token = self.next()
        if token.token_type is not TokenType.STRING:
            raise self.error(f"expected a quoted string, found {token.text!r}", token)
        return token.text

    def value(self) -> str:
        """A quoted string, a number or a bare word."""
        sign = "-" if self.take("-") else ""
        return sign + self.next().text

    def options(self) -> dict[str, str]:
        """`(a.b = 'x', c = 3)`"""
        self.expect("(")
        found: dict[str, str] = {}
        while not self.take(")"):
            name = self.option_name()
            self.expect("=")
            if name in found:
                raise UsageError("DUPLICATE_OPTION", f"option {name} is given twice")
            found[name] = self.value()
            if not self.take(","):
                self.expect(")")
                break
        return found

    def option_name(self) -> str:
        name = self.next().text
        while self.take("."):
            name += "." + self.next().text
        return name.lower()

    def rest(self) -> str:
        """The text from here to the end."""
        if self.done:
            return ""
        return self.text[self.tokens[self.at].start : self.tokens[-1].end + 1]

    def parenthesised(self) -> str:
        """The text inside a pair of parentheses that begins here."""
        self.expect("(")
        start, depth = self.at, 1
        while depth:
            depth += nesting(self.next())
        inner = self.tokens[start : self.at - 1]
        return self.text[inner[0].start : inner[-1].end + 1] if inner else ""

    def end(self) -> None:
        if not self.done:
            raise self.error(f"unexpected {self.tokens[self.at].text!r}", self.tokens[self.at])

    def error(self, message: str, token: Token | None = None) -> UsageError:
        token = token or (self.tokens[self.at] if not self.done else None)
        where = f"line {token.line}, column {token.col}" if token else "at its end"
        return UsageError("SQL_SYNTAX", message, detail=where, hint="docs/sql.md has the grammar")

    def _is_string(self, ahead: int) -> bool:
        index = self.at + ahead
        return index < len(self.tokens) and self.tokens[index].token_type is TokenType.STRING


def nesting(token: Token) -> int:
    """How much deeper the next token is in parentheses; one inside a string or a quoted name is none."""
    return (token.token_type is TokenType.L_PAREN) - (token.token_type is TokenType.R_PAREN)
