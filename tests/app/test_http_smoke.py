from tests.app.conftest import Server
async def test_a(server: Server) -> None:
    print(await server.post("/v1/chat/completions", {"messages":[{"role":"user","content":"hi"}]}))
    for e in await server.events("/v1/chat/completions", {"messages":[{"role":"user","content":"hi"}],"stream":True,"stream_options":{"include_usage":True}}): print(e)
    print(await server.post("/v1/completions", {"prompt":"abc","echo":True,"logprobs":2,"max_tokens":0}))
    for e in await server.events("/v1/completions", {"prompt":["abc",'d'],"echo":True,"logprobs":1,"max_tokens":2,"stream":True,"n":2}): print(e)
    for e in await server.events("/generate", {"text":"abc","sampling_params":{"max_new_tokens":2},"stream":True,"return_logprob":True,"logprob_start_len":0}): print(e)
    print(await server.post("/generate", {"input_ids":[[1,2],[3]],"sampling_params":{"max_new_tokens":2},"return_logprob":True,"top_logprobs_num":2,"logprob_start_len":0}))
    for p in ["/health","/metrics","/v1/models","/v1/models/org/tiny","/v1/models/x","/server_info","/health_generate","/nope","/generate"]:
        async with server.http.get(p) as r: print(p, r.status, (await r.text())[:300], dict(r.headers) if p in("/nope","/health") else "")
