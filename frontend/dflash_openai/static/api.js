// The server's OpenAI endpoints: requests, streams of server-sent events, and errors a person can act on.

/** An answer of the server that is an error, or no answer at all (status 0). */
export class ApiError extends Error {
  constructor(status, message, { code = null, type = null, retryAfter = null } = {}) {
    super(message);
    this.status = status;
    this.code = code;
    this.type = type;
    this.retryAfter = retryAfter;
  }

  static unreachable() {
    return new ApiError(0, `No answer from ${location.host}. Is the server running?`);
  }

  static brokenOff() {
    return new ApiError(0, "The connection ended before the answer did. What had arrived is kept.");
  }

  /** From a response whose status is an error; its body may be OpenAI's form, plain text or nothing. */
  static async from(response) {
    const text = await response.text().catch(() => "");
    let detail = {};
    try {
      detail = JSON.parse(text).error ?? {};
    } catch {
      detail = { message: text.slice(0, 500) };
    }
    const seconds = Number.parseFloat(response.headers.get("retry-after") ?? "");
    return new ApiError(response.status, detail.message || response.statusText || `status ${response.status}`, {
      ...detail,
      retryAfter: Number.isFinite(seconds) ? seconds : null,
    });
  }
}

/** What an error means and what to do about it, for the page. */
export function explain(error) {
  const message = error.message ?? "";
  if (error.status === 0) return { title: "Server unreachable", hint: "" };
  if (error.status === 403) return { title: "Not allowed", hint: "" };
  if (error.status === 401)
    return { title: "API key refused", hint: "Enter a valid key under Connection.", field: "api-key" };
  if (error.status === 429) return { title: "Server busy", hint: "It takes no more requests for the moment." };
  if (error.status === 404) return { title: "Not found", hint: "Choose another model at the top." };
  if (error.status === 413 || /context|max_model_len|too long|maximum.*length/i.test(message))
    return { title: "Too long", hint: "Begin a new chat, shorten the prompt or ask for fewer tokens." };
  if (error.status === 503) return { title: "Server not ready", hint: "The model may still be loading." };
  if (error.status >= 500) return { title: "Server error", hint: "" };
  return { title: "Request refused", hint: "" };
}

/** The `data` of each server-sent event of a stream of bytes. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const raw of lines) {
        const line = raw.endsWith("\r") ? raw.slice(0, -1) : raw;
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export class Api {
  /** `getKey` returns the API key, or an empty text. */
  constructor(getKey) {
    this.getKey = getKey;
  }

  async request(path, options = {}) {
    const key = this.getKey();
    const headers = { ...(options.body && { "content-type": "application/json" }) };
    if (key) headers.authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    } catch (error) {
      throw error.name === "AbortError" ? error : ApiError.unreachable();
    }
    if (!response.ok) throw await ApiError.from(response);
    return response;
  }

  async models() {
    return (await (await this.request("v1/models")).json()).data;
  }

  async isReady() {
    await this.request("health/ready");
  }

  /** Each chunk of a chat completion, until the stream's end. */
  async *chat(body, signal) {
    const response = await this.request("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal,
    });
    try {
      for await (const data of events(response.body)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(chunk.error.status ?? 500, chunk.error.message, chunk.error);
        yield chunk;
      }
    } catch (error) {
      if (error.name === "AbortError" || error instanceof ApiError) throw error;
      throw ApiError.brokenOff();
    }
    throw ApiError.brokenOff();
  }
}
