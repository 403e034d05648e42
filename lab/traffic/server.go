// Package traffic is the lab's servers and clients: real HTTP and UDP, whose
// answers say which server gave them and whose content can be checked.
package traffic

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"time"
)

// Uploaded is a server's answer to an upload.
type Uploaded struct {
	Server string `json:"server"`
	Bytes  int64  `json:"bytes"`
	SHA256 string `json:"sha256"`
}

// Content is the n bytes that every server gives for /bytes/<n>, and that
// uploads of n bytes have: pseudo-random, the same everywhere.
func Content(n int64) io.Reader {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], uint64(n))
	return io.LimitReader(rand.NewChaCha8(seed), n)
}

// Sum is the SHA-256 of Content(n) in hexadecimal.
func Sum(n int64) string {
	h := sha256.New()
	// Neither side can fail.
	_, _ = io.Copy(h, Content(n))
	return hex.EncodeToString(h.Sum(nil))
}

// MaxBytes is the most that /bytes/<n> gives.
const MaxBytes = 1 << 34

// Handler serves
//
//	GET /           the server's name
//	GET /healthz    200
//	GET /bytes/<n>  n bytes of Content
//	PUT /upload     takes any body and answers with Uploaded
func Handler(name string) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, name) })
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /bytes/{n}", func(w http.ResponseWriter, r *http.Request) {
		n, err := strconv.ParseInt(r.PathValue("n"), 10, 64)
		if err != nil || n < 0 || n > MaxBytes {
			http.Error(w, fmt.Sprintf("n: %q is not a number from 0 to %d", r.PathValue("n"), int64(MaxBytes)), http.StatusBadRequest)
			return
		}
		w.Header().Set("Server", name)
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Content-Length", strconv.FormatInt(n, 10))
		// The client sees a short body if this fails.
		_, _ = io.Copy(w, Content(n))
	})
	mux.HandleFunc("PUT /upload", func(w http.ResponseWriter, r *http.Request) {
		h := sha256.New()
		n, err := io.Copy(h, r.Body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(Uploaded{name, n, hex.EncodeToString(h.Sum(nil))})
	})
	return mux
}

// Serve answers HTTP on TCP and echoes datagrams with the server's name behind
// them on UDP, on one port of every address, until ctx ends.
func Serve(ctx context.Context, name string, port uint16) error {
	address := net.JoinHostPort("", strconv.Itoa(int(port)))
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	u, err := net.ListenPacket("udp", address)
	if err != nil {
		l.Close()
		return fmt.Errorf("serve UDP: %w", err)
	}
	server := &http.Server{Handler: Handler(name), ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { server.Close(); u.Close() })
	defer stop()
	go echo(u, name)
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve HTTP: %w", err)
	}
	return nil
}

func echo(u net.PacketConn, name string) {
	b := make([]byte, 65536)
	for {
		n, from, err := u.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		// A lost answer is what the client counts.
		_, _ = u.WriteTo(append(b[:n], name...), from)
	}
}
