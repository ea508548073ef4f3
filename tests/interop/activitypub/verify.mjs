// Verifies signed requests as servers of the fediverse do, driven by JSON lines on stdin (see ../obey.mjs).
// A request has `method`, `url`, `headers` (with Host), `body` in base64, and `pem`, the key to be found at its key's id.
import { createHash } from "node:crypto";
import { verifyRequest } from "@fedify/fedify";
import peertube from "@peertube/http-signature";
import { obey } from "../obey.mjs";

// An actor whose document has this key, in the place where everybody looks for it.
const actor = (keyId, pem) => ({
  "@context": ["https://www.w3.org/ns/activitystreams", "https://w3id.org/security/v1"],
  id: keyId.split("#")[0],
  type: "Person",
  inbox: `${keyId.split("#")[0]}/inbox`,
  publicKey: { id: keyId, owner: keyId.split("#")[0], publicKeyPem: pem },
});

// Fedify answers with the id of the key, or null.
async function fedify({ method, url, headers, body, pem, keyId, spec }) {
  const request = new Request(url, { method, headers, body: Buffer.from(body, "base64") });
  const documentLoader = async (documentUrl) => ({ contextUrl: null, documentUrl, document: actor(keyId, pem) });
  return (await verifyRequest(request, { documentLoader, spec }))?.id?.href;
}

// PeerTube asks for these headers, allows for this skew, and compares the digest itself.
function peertubeVerifies({ method, url, headers, body, pem }) {
  const lower = Object.fromEntries(Object.entries(headers).map(([name, value]) => [name.toLowerCase(), value]));
  const request = { method, url: url.slice(new URL(url).origin.length), headers: lower, httpVersion: "1.1" };
  try {
    const parsed = peertube.parseRequest(request, {
      authorizationHeaderName: "signature",
      algorithm: "rsa-sha256",
      clockSkew: 3600,
      headers: ["(request-target)", "host", "digest"],
    });
    const digest = createHash("sha256").update(Buffer.from(body, "base64")).digest("base64");
    return lower.digest === `SHA-256=${digest}` && peertube.verifySignature(parsed, pem) ? parsed.keyId : null;
  } catch {
    return null;
  }
}

await obey({ fedify, peertube: peertubeVerifies });
