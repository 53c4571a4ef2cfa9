"""What is shown of an error in a function that a user has named."""

import asyncio
import csv
import importlib.util
import inspect
import json
import os
import sys

import pytest

import fastrl
import fastrl_kernels
from fastrl import user_code
from fastrl.rewards.functions import load_function
from fastrl.user_code import fault_of

SOURCE = """\
import json

def helper(table):
    return table["missing"]

def key(**columns):
    return [helper({})]

def library(**columns):
    return json.loads("{")

def silent(**columns):
    assert False

async def later(**columns):
    raise ValueError("not now")

class Scorer:
    def to(self, device):
        return self

    def __call__(self, **columns):
        raise ValueError("own")

scorer = Scorer()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_functions.py"
    path.write_text(SOURCE)
    return path


def fault(name, *arguments, **keywords):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        load_function(name)(*arguments, **keywords)
    return fault_of(raised.value)


def test_the_users_own_lines_are_shown(file):
    found = fault(f"{file}:key")
    assert found.message == (f"{file}:key raised KeyError: 'missing' ({file}, line 4)")
    assert [line.strip() for line in found.where.splitlines() if "File" in line] == [
        f'File "{file}", line 7, in key',
        f'File "{file}", line 4, in helper',
    ]


def test_a_librarys_lines_are_left_out(file):
    found = fault(f"{file}:library")
    assert found.message.startswith(f"{file}:library raised JSONDecodeError: Expecting property")
    assert found.message.endswith(f"({file}, line 10)")
    assert json.__file__ not in found.where


def test_an_error_that_says_nothing_is_named_by_its_type(file):
    assert fault(f"{file}:silent").message == (
        f"{file}:silent raised AssertionError ({file}, line 13)"
    )


def test_a_call_that_fails_before_the_function_begins_says_why(file):
    found = fault(f"{file}:key", 1)
    assert "takes 0 positional arguments but 1 was given" in found.message
    assert str(file) in found.message


@pytest.mark.parametrize(("source", "message"), [
    ("def f(:\n    pass\n", "SyntaxError: invalid syntax ({file}, line 1)"),
    ("\n1 / 0\n", "ZeroDivisionError: division by zero ({file}, line 2)"),
    ("import no_such", "ModuleNotFoundError: No module named 'no_such' ({file}, line 1)"),
])  # fmt: skip
def test_a_file_that_cannot_be_read_is_at_fault_itself(tmp_path, source, message):
    file = tmp_path / "broken_functions.py"
    file.write_text(source)
    assert fault(f"{file}:f").message == f"{file} raised {message.format(file=file)}"


def test_a_file_imports_its_neighbours_which_hide_no_module(tmp_path, monkeypatch):
    (tmp_path / "beside_one.py").write_text("NUMBER = 3\n")
    (tmp_path / "beside_two.py").write_text("NUMBER = 4\n")
    (tmp_path / "csv.py").write_text("1 / 0\n")
    (tmp_path / "with_neighbours.py").write_text(
        "import csv\nfrom beside_one import NUMBER\n"
        "def f():\n    import beside_two\n    return [NUMBER, beside_two.NUMBER, csv.__file__]\n"
    )
    monkeypatch.delitem(sys.modules, "csv", raising=False)
    assert load_function(f"{tmp_path}/with_neighbours.py:f")() == [3, 4, csv.__file__]
    assert load_function(f"{tmp_path}/with_neighbours.py:f")
    assert sys.path.count(str(tmp_path)) == 1


def test_an_async_function_stays_one_and_its_error_is_its_own(file):
    function = load_function(f"{file}:later")
    assert inspect.iscoroutinefunction(function)
    with pytest.raises(ValueError, match="not now") as raised:
        asyncio.run(function())
    found = fault_of(raised.value)
    assert found.message == f"{file}:later raised ValueError: not now ({file}, line 16)"


def test_objects_that_can_be_called_stay_what_they_are(file):
    scorer = load_function(f"{file}:scorer")
    assert scorer.to("cpu") is scorer


def test_other_errors_are_nobodys_fault():
    assert fault_of(ValueError("ours")) is None
    with pytest.raises(ImportError) as raised:
        load_function("no_such_module:f")
    assert fault_of(raised.value) is None


@pytest.mark.parametrize("name", [":f", "file.py:", ".x:f:", "."])
def test_half_a_name_is_refused(name):
    with pytest.raises((ValueError, FileNotFoundError)):
        load_function(name)


def test_no_file_of_a_library_is_the_users_by_any_path(file, tmp_path, monkeypatch):
    """An editable installation has links to its folders."""
    (tmp_path / "fastrl").symlink_to(os.path.dirname(fastrl.__file__))
    spec = importlib.util.spec_from_file_location("linked", tmp_path / "fastrl" / "user_code.py")
    linked = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "linked", linked)
    spec.loader.exec_module(linked)
    for package in (fastrl, fastrl_kernels, json):
        folder, link = os.path.dirname(package.__file__), tmp_path / f"{package.__name__}-link"
        link.symlink_to(folder)
        for path in (folder, os.path.realpath(folder), link):
            for module in (user_code, linked):
                assert not module.is_users(os.path.join(path, "__init__.py")), path
    assert user_code.is_users(str(file))
    assert linked.is_users(str(file))
