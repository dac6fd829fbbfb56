"""posttrain is-palindrome TEXT"""

from typing import Annotated

import typer

from posttrain_palindromes.verifier import is_palindrome as check


def is_palindrome(text: Annotated[str, typer.Argument(help="What is looked at.")]) -> None:
    """Says whether a text is a palindrome."""
    typer.echo("yes" if check(text) else "no")
