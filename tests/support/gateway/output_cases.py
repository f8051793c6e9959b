"""The calls of the tests in the text of each format, as the models' chat templates write them."""

from __future__ import annotations

from typing import NamedTuple

from quire.gateway.features.tools import (
    gemma4,
    harmony,
    hermes,
    json_lists,
    llama_json,
    mistral,
    pythonic,
    sections,
    tagged,
)

IN_PARIS = '{"city": "Paris", "days": 3}'


class Case(NamedTuple):
    """One format. `one`: the answer that is a call of get_weather. `two`: that and a call of clock, or empty.

    special, added: the tokens of a tokenizer of the family. leads: true if text may come before the first call.
    """

    name: str
    one: str
    two: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    leads: bool = True


def _object(name_key: str, name: str, arguments_key: str, arguments: str) -> str:
    return f'{{"{name_key}": "{name}", "{arguments_key}": {arguments}}}'


_PARIS, _CLOCK = _object("name", "get_weather", "arguments", IN_PARIS), _object("name", "clock", "arguments", "{}")
_HERMES = f"<tool_call>\n{_PARIS}\n</tool_call>"
_XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
_LLAMA = _object("name", "get_weather", "parameters", IN_PARIS)
_V3 = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>",
    "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
)
_HARMONY = (
    "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant"
    f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{IN_PARIS}"
)
_DEEPSEEK_TOKENS = tuple(sections.DEEPSEEK)


def _deepseek(form: str, *calls: tuple[str, str], separator: str) -> str:
    return (
        sections.DEEPSEEK.section + separator.join(form.format(*call) for call in calls) + sections.DEEPSEEK.section_end
    )


def _kimi(*calls: tuple[str, str]) -> str:
    texts = (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls, 3)
    )
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def _cohere(*calls: tuple[str, str]) -> str:
    texts = (
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {arguments}}}'
        for index, (name, arguments) in enumerate(calls)
    )
    return "<|START_ACTION|>[\n" + ",\n".join(texts) + "\n]<|END_ACTION|>"


_GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>"
)
_INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
    "</invoke>\n"
)
_MINIMAX = "<minimax:tool_call>\n{}</minimax:tool_call>"
_GEMMA = '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>'


CASES = [
    Case(
        "hermes",
        _HERMES,
        f"{_HERMES}\n<tool_call>\n{_CLOCK}\n</tool_call>",
        added=(hermes.START, hermes.END),
    ),
    Case(
        "qwen3_coder",
        _XML,
        _XML + "\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        added=(hermes.START, hermes.END),
    ),
    Case(
        "llama3_json",
        _LLAMA,
        _LLAMA + '; {"name": "clock", "parameters": {}}',
        special=(llama_json.PYTHON_TAG,),
        leads=False,
    ),
    Case(
        "pythonic",
        '[get_weather(city="Paris", days=3)]',
        '[get_weather(city="Paris", days=3), clock()]',
        special=(pythonic.PYTHON_START, pythonic.PYTHON_END),
        leads=False,
    ),
    Case(
        "mistral",
        f"[TOOL_CALLS][{_PARIS}]",
        f"[TOOL_CALLS][{_PARIS}, {_CLOCK}]",
        special=(mistral.CALLS,),
    ),
    Case(
        "mistral_args",
        f"[TOOL_CALLS]get_weather[ARGS]{IN_PARIS}",
        f"[TOOL_CALLS]get_weather[ARGS]{IN_PARIS}[TOOL_CALLS]clock[ARGS]{{}}",
        special=(mistral.CALLS, mistral.ARGS, mistral.CALL_ID),
    ),
    Case(
        "deepseek",
        _deepseek(_V3[0], ("get_weather", IN_PARIS), separator=""),
        _deepseek(_V3[0], ("get_weather", IN_PARIS), ("clock", "{}"), separator="\n"),
        added=_DEEPSEEK_TOKENS,
    ),
    Case(
        "deepseek_v31",
        _deepseek(_V3[1], ("get_weather", IN_PARIS), separator=""),
        _deepseek(_V3[1], ("get_weather", IN_PARIS), ("clock", "{}"), separator=""),
        added=_DEEPSEEK_TOKENS,
    ),
    Case(
        "kimi_k2",
        _kimi(("get_weather", IN_PARIS)),
        _kimi(("get_weather", IN_PARIS), ("clock", "{}")),
        special=tuple(sections.KIMI),
    ),
    Case(
        "glm",
        _GLM,
        f"{_GLM}\n<tool_call>clock\n</tool_call>",
        added=(*tagged.GLM[:2], *tagged.GLM.key, *tagged.GLM.value),
    ),
    Case(
        "minimax_m2",
        _MINIMAX.format(_INVOKE),
        _MINIMAX.format(f'{_INVOKE}<invoke name="clock">\n</invoke>\n'),
        added=tagged.MINIMAX[:2],
    ),
    Case(
        "gemma4",
        _GEMMA,
        f"{_GEMMA}<|tool_call>call:clock{{}}<tool_call|>",
        special=(gemma4.START, gemma4.END, gemma4.QUOTE),
    ),
    Case(
        "cohere",
        _cohere(("get_weather", IN_PARIS)),
        _cohere(("get_weather", IN_PARIS), ("clock", "{}")),
        added=(json_lists.ACTION, json_lists.ACTION_END, json_lists.RESPONSE, json_lists.RESPONSE_END),
    ),
    Case("granite", f"<|tool_call|>[{_PARIS}]", f"<|tool_call|>[{_PARIS}, {_CLOCK}]", special=(json_lists.GRANITE,)),
    Case("harmony", _HARMONY, "", special=tuple(sorted(harmony.Harmony.markers)), leads=False),
    Case(
        "json",
        _object("tool", "get_weather", "arguments", IN_PARIS),
        f"{_object('tool', 'get_weather', 'arguments', IN_PARIS)}\n{_object('tool', 'clock', 'arguments', '{}')}",
        leads=False,
    ),
]
