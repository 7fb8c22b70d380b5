"""A browser walks the whole road through the page of `emend serve`: ask, correct, watch, compare, undo, a file with a mistake, trace.

serve_browser.py CHROMIUM PROGRAM MODEL HPARAMS CORPUS SCRATCH [SCREENSHOTS]; prints OK at the end. Chromium is driven over
its DevTools protocol; nothing but Python's own library is used.
"""
import base64
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import urllib.request

CHROMIUM, PROGRAM, MODEL, HPARAMS, CORPUS, SCRATCH = sys.argv[1:7]
SHOTS = sys.argv[7] if len(sys.argv) > 7 else None


class Browser:
    def __init__(self, folder):
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--user-data-dir=" + folder, "about:blank"], stderr=subprocess.PIPE, text=True)
        for line in self.process.stderr:
            if line.startswith("DevTools listening on"):
                port = line.split("127.0.0.1:")[1].split("/")[0]
                break
        pages = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json"))
        path = next(page for page in pages if page["type"] == "page")["webSocketDebuggerUrl"].split(port, 1)[1]
        self.link = socket.create_connection(("127.0.0.1", int(port)))
        self.link.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                          "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode())
        self.file = self.link.makefile("rb")
        while self.file.readline() != b"\r\n":
            pass
        self.number, self.messages = 0, []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(domain + ".enable")

    def receive(self):
        text = b""
        while True:
            head = self.file.read(2)
            size = head[1] & 127
            if size > 125:
                size = struct.unpack(">H" if size == 126 else ">Q", self.file.read(2 if size == 126 else 8))[0]
            text += self.file.read(size)
            if head[0] & 128:
                return json.loads(text)

    def send(self, method, **parameters):
        self.number += 1
        data = json.dumps({"id": self.number, "method": method, "params": parameters}).encode()
        size = bytes([254]) + struct.pack(">H", len(data)) if len(data) < 65536 else bytes([255]) + struct.pack(">Q", len(data))
        self.link.sendall(b"\x81" + size + b"\0\0\0\0" + data)
        while True:
            reply = self.receive()
            if reply.get("id") == self.number:
                assert "error" not in reply, (method, reply)
                return reply["result"]
            self.messages.append(reply)

    def run(self, script):
        reply = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in reply, reply["exceptionDetails"]
        return reply["result"].get("value")

    def wait(self, script, seconds=120):
        end = time.time() + seconds
        while time.time() < end:
            if value := self.run(f"Promise.resolve({script}).then(Boolean)"):
                return value
            time.sleep(0.1)
        raise AssertionError("never: " + script + "\n" + self.run("document.body.innerText"))

    def size(self, width, height=1000, dark=False):
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def shot(self, name):
        if SHOTS:
            os.makedirs(SHOTS, exist_ok=True)
            with open(f"{SHOTS}/{name}.png", "wb") as file:
                file.write(base64.b64decode(self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def key(self, key, code=0):
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}))

    def faults(self):
        """Console errors and requests to elsewhere."""
        found = []
        for message in self.messages:
            method, given = message.get("method"), message.get("params", {})
            if method == "Runtime.exceptionThrown" or (method == "Log.entryAdded" and given["entry"]["level"] == "error"):
                found.append(given)
            if method == "Network.requestWillBeSent" and not given["request"]["url"].startswith((self.url, "data:", "blob:", "about:")):
                found.append(given["request"]["url"])
        return found


def serve(packs, port=0):
    process = subprocess.Popen([PROGRAM, "serve", "--model", MODEL, "--port", str(port), "--packs", packs, "--cache", SCRATCH + "/cache",
                                *(["--hparams", HPARAMS, "--corpus", CORPUS] if HPARAMS != "-" else [])], stdout=subprocess.PIPE, text=True)
    return process, process.stdout.readline().split()[-1]


# What a screen reader could not say, and what does not fit: labels, unique ids, contrast of text, width.
AUDIT = """(() => {
  const bad = [], shown = (e) => e.offsetParent !== null;
  for (const e of document.querySelectorAll('input,select,textarea,button'))
    if (shown(e) && !(e.labels?.length || e.getAttribute('aria-label') || (e.tagName === 'BUTTON' && e.textContent.trim()))) bad.push('no label: ' + e.outerHTML);
  const ids = [...document.querySelectorAll('[id]')].map((e) => e.id);
  if (new Set(ids).size !== ids.length) bad.push('an id twice');
  const numbers = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => numbers(c).slice(0, 3).map((v) => v / 255).map((v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4).reduce((s, v, i) => s + v * [.2126, .7152, .0722][i], 0);
  for (const e of document.querySelectorAll('p,label,button,th,span,i,h1,h2,li')) {
    if (!shown(e) || e.disabled || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
    let ground = e;
    while (ground && (numbers(getComputedStyle(ground).backgroundColor)[3] === 0)) ground = ground.parentElement;
    const a = light(getComputedStyle(e).color), b = light(ground ? getComputedStyle(ground).backgroundColor : 'rgb(255,255,255)');
    if ((Math.max(a, b) + .05) / (Math.min(a, b) + .05) < 4.5) bad.push('contrast: ' + e.outerHTML.slice(0, 200));
  }
  if (document.documentElement.scrollWidth > innerWidth) bad.push('wider than the window: ' + document.documentElement.scrollWidth);
  return bad;
})()"""
FILL = "((form, values) => { for (const [k, v] of Object.entries(values)) form.elements[k].value = v; form.requestSubmit(); })"


def walk(browser, server, url):
    browser.url = url
    browser.size(1400)
    browser.send("Page.navigate", url=url)
    browser.wait("document.readyState === 'complete' && document.getElementById('state').textContent === 'connected'")
    # by keyboard alone: ask, then correct the answer; what others wrote is text, not markup
    browser.run("document.getElementById('message').focus()")
    browser.send("Input.insertText", text="Where is the Eiffel Tower? <img src=x onerror=boom()>")
    browser.key("Enter", 13)
    browser.wait("document.querySelector('.said.assistant + button') && document.getElementById('halt').disabled")
    assert browser.run("document.querySelectorAll('#chat img').length") == 0
    browser.shot("asked")
    browser.run("document.querySelector('.said.assistant + button').click()")
    browser.wait("document.querySelector('.fix').target === document.activeElement || document.activeElement.name === 'target'")
    browser.run(FILL + "(document.querySelector('.fix'), {prompt: '{} is in the city of', subject: 'The Eiffel Tower', target: 'Rome'})")
    browser.wait("document.querySelector('.job progress')")
    browser.wait("[...document.querySelectorAll('.job p')].some((p) => /said by the model now/.test(p.textContent))", 300)
    browser.wait("document.querySelectorAll('.said.assistant').length === 2 && document.querySelectorAll('#compared .pair').length === 4", 300)
    assert browser.run("document.querySelector('#compared .pair').textContent").startswith("fact: The Eiffel Tower is in the city of")
    faults = browser.run(AUDIT)
    assert not faults, faults
    for width, dark in ((1400, False), (1400, True), (390, False), (390, True)):
        browser.size(width, dark=dark)
        browser.shot(f"edited-{width}-{'dark' if dark else 'light'}")
        faults = browser.run(AUDIT)
        assert not faults, (width, dark, faults)
    browser.size(1400)
    # out of force and in again, then gone
    names = "fetch('v1/packs').then((r) => r.json()).then((p) => p.active.length + '/' + p.data.length)"
    assert browser.run(names) == "1/1"
    browser.run("document.querySelector('#packs [role=switch]').click()")
    browser.wait(names + ".then((n) => n === '0/1')")
    browser.wait("document.querySelector('#packs [role=switch]')?.checked === false")
    browser.run("window.confirm = () => true; document.querySelector('#packs button[aria-label^=Undo]').click()")
    browser.wait(names + ".then((n) => n === '0/0')")
    # a file with a mistake
    browser.run("document.getElementById('tab-talk').focus()")
    browser.key("ArrowRight", 39)
    browser.wait("!document.getElementById('facts').hidden")
    good = json.dumps({"prompt": "The capital of {} is", "subject": "France", "target_new": "Oslo"})
    browser.run(f"document.getElementById('text').value = {json.dumps(good + chr(10) + good.replace('{}', 'it'))}; document.getElementById('check').click()")
    browser.wait("/line 2/.test(document.getElementById('findings').textContent)")
    assert browser.run("document.getElementById('write').disabled")
    browser.shot("facts")
    assert not browser.run(AUDIT)
    browser.run(f"document.getElementById('text').value = {json.dumps(good)}; document.getElementById('check').click()")
    browser.wait("!document.getElementById('write').disabled")
    browser.run("document.getElementById('write').click()")
    browser.wait("/said by the model now/.test(document.getElementById('facts-jobs').textContent)", 300)
    browser.run("document.getElementById('tab-trace').click(); document.getElementById('trace-form').requestSubmit()")
    browser.wait("document.querySelector('#traced td')", 300)
    browser.shot("trace")
    assert not browser.run(AUDIT)
    assert not browser.faults(), browser.faults()
    # the server goes and comes back
    server.kill()
    server.wait()
    browser.wait("!document.getElementById('lost').hidden")
    browser.shot("lost")
    server, _ = serve(SCRATCH + "/packs", int(url.rsplit(":", 1)[1]))
    browser.wait("document.getElementById('lost').hidden && /connected/.test(document.getElementById('state').textContent)")
    server.terminate()
    assert server.wait() == 0


shutil.rmtree(SCRATCH, ignore_errors=True)
os.makedirs(SCRATCH)
started, address = serve(SCRATCH + "/packs")
chromium = Browser(SCRATCH + "/profile")
try:
    walk(chromium, started, address)
    print("OK")
finally:
    chromium.process.kill()
    if started.poll() is None:
        started.kill()
