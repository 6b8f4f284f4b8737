"""Wait until a server is ready, send one chat request, print the answer; fail if it is wrong."""

import json
import sys
import time
import urllib.error
import urllib.request

TIMEOUT = 600  # seconds: the first start fetches the model

url = sys.argv[1]
deadline = time.monotonic() + TIMEOUT
while True:
    try:
        urllib.request.urlopen(f"{url}/health")
        break
    except (urllib.error.URLError, ConnectionError):
        if time.monotonic() > deadline:
            sys.exit("the server did not become ready")
        time.sleep(0.5)

question = "What is the capital of France? Answer in one sentence."
body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 32}
request = urllib.request.Request(
    f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(answer)
if "Paris" not in answer:
    sys.exit("wrong answer: expected 'Paris' in it")
