// Requests to the server that sent this page. Addresses are relative: a prefix of a proxy is kept.

const KEY = "loom-api-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => sessionStorage.setItem(KEY, text),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Dispatched on `window` when the server refuses the key, or that there is none. */
export const KEY_REFUSED = "loom-key-refused";

/** An error of the API: `fields` are those of its `error` object. Status 0: there was no answer. */
export class ApiError extends Error {
  constructor(status, fields) {
    super(fields.message);
    this.status = status;
    this.fields = fields;
  }
}

/** The response to a GET, or to a POST if there is a body. Throws `ApiError` unless its status is 2xx. */
export async function request(path, { body, signal } = {}) {
  const headers = {};
  const used = key.get();
  if (used) headers.Authorization = `Bearer ${used}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) sent.body = JSON.stringify(body);
  const response = await answered(fetch(path, sent));
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  // A late answer to the key before says nothing of the one that the user has typed since.
  if (response.status === 401 && used === key.get()) window.dispatchEvent(new Event(KEY_REFUSED));
  throw new ApiError(response.status, fieldsOf(found.error, `The server answered with status ${response.status}.`));
}

/** The events of a stream, parsed. Throws `ApiError` for an error event, and for an end before `[DONE]`. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await answered(reader.read());
    if (done) throw new ApiError(0, { message: "The answer ended early: the connection was closed." });
    const whole = (held + value).split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      const lines = event.split("\n").filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice("data: ".length)).join("\n");
      if (data === "[DONE]") return;
      if (!data) continue; // a comment that keeps the connection open
      const parsed = JSON.parse(data);
      if (parsed.error) throw new ApiError(200, fieldsOf(parsed.error, "The answer failed."));
      yield parsed;
    }
  }
}

async function answered(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server does not answer." });
  }
}

const fieldsOf = (error, otherwise) => (typeof error?.message === "string" ? error : { message: otherwise });
