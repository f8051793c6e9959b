"""The description of the API as an OpenAPI 3.1 document, from the declarations of the parameters."""
