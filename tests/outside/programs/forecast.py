"""The models and tools of the programs. Enums and bounds leave the demo model nothing to get wrong."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

QUESTION = "How is the weather in Rome?"


class Forecast(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    sky: Literal["sunny", "cloudy"]
    days: int = Field(ge=1, le=3)


class GetWeather(BaseModel):
    """Looks the weather of a city up."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": GetWeather.model_json_schema(),
    },
}
