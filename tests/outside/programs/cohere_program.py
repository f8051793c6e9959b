"""`cohere`: rerank in both versions of its API. Arguments after the URL: the query and the documents, as JSON."""

import asyncio
import json
import sys

import cohere
from cases import run

QUERY, DOCUMENTS = json.loads(sys.argv[2])
ASKED = {"model": "reranker", "query": QUERY}


def options(url):
    return {"api_key": "none", "base_url": url.removesuffix("/v1")}


def plain(answer):
    return [[one.index, one.relevance_score] for one in answer.results]


def version_1(url):
    client = cohere.Client(**options(url))
    objects = [{"text": text, "title": str(index)} for index, text in enumerate(DOCUMENTS)]
    whole = client.rerank(documents=objects, return_documents=True, rank_fields=["text"], **ASKED)
    texts = [one.document.text for one in whole.results]
    return {"results": plain(whole), "texts": texts, "units": whole.meta.billed_units.search_units}


def version_2(url):
    client = cohere.ClientV2(**options(url))
    answer = client.rerank(documents=DOCUMENTS, top_n=2, max_tokens_per_doc=4096, **ASKED)
    return {"results": plain(answer), "id": answer.id}


def version_2_async(url):
    async def ask():
        return await cohere.AsyncClientV2(**options(url)).rerank(documents=DOCUMENTS, **ASKED)

    return plain(asyncio.run(ask()))


def refused(url):
    try:
        cohere.Client(**options(url)).rerank(documents=DOCUMENTS, rank_fields=["title"], **ASKED)
    except cohere.BadRequestError as error:
        return error.body["error"]["param"]


run(version_1, version_2, version_2_async, refused)
