// Counts the words of a text, as an HTTP handler: takes signed requests only, and stops without cutting off an answer.
//
//   [handlers.count-words]
//   http = { url = "http://127.0.0.1:8080/count-words", timeout = "30s", secret_file = "/run/secrets/webhook" }
//
//   WEBHOOK_SECRET_FILE=/run/secrets/webhook PORT=8080 node server.js
const crypto = require("crypto");
const fs = require("fs");
const http = require("http");

const secret = fs.readFileSync(process.env.WEBHOOK_SECRET_FILE, "utf8").trim();
const key = secret.startsWith("whsec_") ? Buffer.from(secret.slice(6), "base64") : Buffer.from(secret);

// Standard Webhooks: HMAC-SHA256 over id, time and body; a request older than five minutes is a replay.
function isOurs(headers, body) {
  const time = headers["webhook-timestamp"];
  if (!(Math.abs(Date.now() / 1000 - Number(time)) < 300)) return false;
  const right = crypto.createHmac("sha256", key).update(`${headers["webhook-id"]}.${time}.`).update(body).digest();
  return (headers["webhook-signature"] || "").split(" ").some((signature) => {
    const given = Buffer.from(signature.replace(/^v1,/, ""), "base64");
    return given.length === right.length && crypto.timingSafeEqual(given, right);
  });
}

async function answer(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const body = Buffer.concat(chunks);
  if (!isOurs(request.headers, body)) return [401, "the signature is missing or wrong"];
  const { data } = JSON.parse(body);
  if (!data || typeof data.text !== "string") return [422, "data.text must be a text"]; // never again
  return [200, { words: data.text.split(/\s+/).filter(Boolean).length }];
}

const server = http.createServer(async (request, response) => {
  let status, said;
  try {
    [status, said] = await answer(request);
  } catch (error) {
    [status, said] = [500, String(error)]; // tried again
  }
  response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(said));
});
server.listen(Number(process.env.PORT || 8080), "127.0.0.1");
process.on("SIGTERM", () => server.close());
