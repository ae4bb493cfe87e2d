"""Every public function and class has an example in its docstring, and every example says what happens."""

from __future__ import annotations

import doctest

import public
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.one_python]

DOCUMENTED = public.documented()
FLAGS = doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


@pytest.mark.parametrize("name", DOCUMENTED)
def test_example(name):
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(DOCUMENTED[name], name, globs={})
    assert test.examples, f"the docstring of {name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.append)
    assert not said, "".join(said)
