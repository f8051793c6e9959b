"""The calls of the tests in the text of each format, as the models' chat templates write them."""

from __future__ import annotations

from typing import NamedTuple

from quire.gateway.features.tools import deepseek, harmony, hermes, llama_json, mistral, pythonic

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
_DEEPSEEK_TOKENS = tuple(sorted(deepseek.DeepSeekV3.markers))


def _deepseek(form: str, *calls: tuple[str, str], separator: str) -> str:
    return deepseek.CALLS_BEGIN + separator.join(form.format(*call) for call in calls) + deepseek.CALLS_END


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
    Case("harmony", _HARMONY, "", special=tuple(sorted(harmony.Harmony.markers)), leads=False),
    Case(
        "json",
        _object("tool", "get_weather", "arguments", IN_PARIS),
        f"{_object('tool', 'get_weather', 'arguments', IN_PARIS)}\n{_object('tool', 'clock', 'arguments', '{}')}",
        leads=False,
    ),
]
