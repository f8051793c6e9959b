from quire.gateway.output.tools import ANY_ARGUMENTS, ToolChoice, ToolMode
from tests.support.gateway.output_answers import CLOCK, TOOLS, WEATHER


def test_the_tools_that_an_answer_may_call() -> None:
    assert ToolChoice(ToolMode.NONE).callable_tools(TOOLS) == []
    assert ToolChoice().callable_tools(TOOLS) == ToolChoice(ToolMode.REQUIRED).callable_tools(TOOLS) == TOOLS
    assert ToolChoice(ToolMode.NAMED, "clock").callable_tools(TOOLS) == [CLOCK]


def test_a_tool_whose_schema_no_grammar_can_follow() -> None:
    relaxed = WEATHER.with_any_arguments()
    assert (relaxed.name, relaxed.description, relaxed.parameters) == (WEATHER.name, WEATHER.description, ANY_ARGUMENTS)
