"""Short, correct answers about how Quire serves a model; prompts and answers are templates."""

ASK = (
    "[What is {}|What's {}|Explain {}|Tell me about {}|What does {} mean|Can you explain {}|Explain {} to me|How does "
    "{} work|Define {}|What do you know about {}][?|.|]"
)

# (the names that a user may give it, what is said about it)
TERMS: tuple[tuple[str, str], ...] = (
    (
        "[a block table|the block table|block tables]",
        "A block table lists the blocks that hold the keys and values of one sequence. [The blocks may lie "
        "anywhere in memory, and|Thanks to it, blocks need not lie side by side:] the table says where to "
        "find each one.",
    ),
    (
        "[paged attention|PagedAttention|paging|paged memory]",
        "PagedAttention stores the keys and values of a sequence in small blocks of equal size, like the "
        "pages of virtual memory. A block table says where each block lies, so that [hardly any memory is "
        "wasted|memory is used almost to the last block].",
    ),
    (
        "[a KV cache|the KV cache|KV caches|the key-value cache|kv cache|KV caching]",
        "A KV cache keeps the keys and values that attention computed for earlier tokens. [With it, each "
        "new token needs only one step of work|Without it, every new token would need all earlier tokens "
        "to be computed again].",
    ),
    (
        "[a token|tokens|tokenization|a tokenizer|the tokenizer]",
        (
            "A token is a piece of text, often a word or a part of a word. A tokenizer cuts text into tokens, "
            "and the model reads and writes nothing else."
        ),
    ),
    (
        "[prefill|the prefill phase|prefilling]",
        (
            "Prefill is the first phase of a request: the model reads the whole prompt at once and fills the "
            "KV cache. After that, decoding begins."
        ),
    ),
    (
        "[decoding|decode|the decode phase]",
        (
            "Decoding is the second phase of a request: the model writes one token per step. Each step reads "
            "the KV cache and adds one more entry to it."
        ),
    ),
    (
        "[continuous batching|batching|a batch|dynamic batching]",
        "Continuous batching lets new requests join the batch at every step, and finished ones leave it at "
        "once. [So nobody waits for the longest answer in the batch|This keeps the machine busy all the "
        "time].",
    ),
    (
        "[preemption|being preempted|a preempted request]",
        "When no block is free, the scheduler preempts a request: it takes its blocks away and lets it "
        "wait. Later the request goes on, and its answer is the same as if nothing had happened.",
    ),
    (
        "[the scheduler|a scheduler|scheduling]",
        (
            "The scheduler decides at every step which requests run. It looks at the free blocks and at the "
            "queue, and it tries to be fair."
        ),
    ),
    (
        "[prefix caching|a prefix cache|prefix sharing|the prefix cache]",
        "Prefix caching keeps the blocks of prompts that begin in the same way. A new request with that "
        "beginning [uses them again|need not compute them again], which saves time and memory.",
    ),
    (
        "[a lease|leases|a fencing token|fencing tokens]",
        "A lease says that a worker owns a request for a short time. If the worker dies, the lease runs "
        "out and another worker takes over; the fencing token makes sure that the old one can no longer "
        "write.",
    ),
    (
        "[Quire|this server|the Quire server|this system|quire]",
        "Quire serves language models with a gateway, workers and Redis between them. [An accepted request "
        "survives the death of any one process.|The gateway takes requests, and the workers compute the "
        "answers.]",
    ),
    (
        "[Redis|the queue|the broker]",
        "Redis stands between the gateway and the workers of Quire. It holds the queue of requests and the "
        "streams of answers, so that no accepted request is lost.",
    ),
    (
        "[the gateway|a gateway]",
        (
            "The gateway takes requests over HTTP, puts them into a queue in Redis and sends the tokens back "
            "as they arrive. It holds no model."
        ),
    ),
    (
        "[a worker|the worker|workers]",
        (
            "A worker takes requests from the queue, runs the model and writes the tokens back. If a worker "
            "dies, another one takes over its requests."
        ),
    ),
    (
        "[streaming|token streaming|server-sent events|SSE]",
        (
            "Streaming means that every token is sent as soon as it is there. You can begin to read while the "
            "model is still writing."
        ),
    ),
    (
        "[attention|self-attention|the attention mechanism]",
        (
            "Attention lets each token look at all tokens before it. It compares a query with many keys and "
            "mixes the values that fit best."
        ),
    ),
    (
        ("[a transformer|transformers|a language model|language models|an LLM|LLMs|a large language model]"),
        "A language model reads tokens and guesses the next one, again and again. [Mine is a transformer: "
        "layers of attention and small networks.|Large ones know a lot, and small ones like me tell short "
        "stories.]",
    ),
    (
        "[TTFT|time to first token|the time to first token]",
        (
            "TTFT is the time to first token: how long you wait before an answer begins. It is mostly the time "
            "in the queue and the time for the prefill."
        ),
    ),
    (
        "[temperature|the temperature|sampling|top-p|top p]",
        "Sampling picks the next token at random, and the temperature says how daring the pick may be. "
        "With a temperature of zero, the most likely token always wins.",
    ),
    (
        "[speculative decoding|a draft model]",
        (
            "Speculative decoding lets a small helper guess several tokens ahead. The large model checks them "
            "all in one step and keeps those that are right."
        ),
    ),
    (
        "[quantization|quantisation|int8|a quantized model]",
        (
            "Quantization stores the weights of a model with fewer bits. The model becomes smaller and often "
            "faster, and it loses only a little quality."
        ),
    ),
    (
        "[a GPU|GPUs|the GPU]",
        (
            "A GPU is a processor that does many simple sums at the same time. Models like that, because they "
            "are made of very many simple sums."
        ),
    ),
    (
        "[an embedding|embeddings|a vector]",
        (
            "An embedding is a list of numbers that stands for a token. Tokens that are used in similar ways "
            "get similar numbers."
        ),
    ),
    (
        "[an EOS token|the EOS token|a stop token|end of sequence]",
        (
            "The EOS token means that the answer is complete. When the model writes it, the server stops and "
            "frees the blocks of the request."
        ),
    ),
)

HOW = (
    (
        (
            "How [do you|does Quire|does the server|does a server] [serve tokens|serve a model|work|answer my "
            "question|make tokens][?|]"
        ),
        "Your prompt is cut into tokens and put into a queue. A worker reads it, fills the KV cache block "
        "by block and then writes one token per step. Each token travels back to you as soon as it is "
        "there.",
    ),
    (
        ("[What happens|What does Quire do] [when|if] a worker [dies|crashes|is killed|fails][?|]"),
        (
            "Another worker takes over. The tokens that you already have are kept in Redis, so the answer goes "
            "on where it stopped."
        ),
    ),
    (
        "[What happens|What does the server do] [when|if] memory [is full|runs out][?|]",
        (
            "Then no block is free, and the scheduler lets the youngest request wait. Its blocks go to the "
            "others, and it continues as soon as there is room."
        ),
    ),
    (
        ("Why [are blocks|is paging|is PagedAttention|is a block table] [useful|good|needed][?|]"),
        "Nobody knows beforehand how long an answer will be. With small blocks, a request takes only the "
        "memory that it really uses, and more requests fit at the same time.",
    ),
)
