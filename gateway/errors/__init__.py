"""The errors of a call.

`api_errors` has one exception per cause, and their JSON in the shape of OpenAI's API; `message_errors` has the shape of
the Messages API; `error_responses` turns exceptions into responses.
"""
