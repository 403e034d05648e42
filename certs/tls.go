package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// LoadServer is the TLS configuration of a manager: it shows cert, asks every
// client for a certificate of the authority ca, and reads the files again when
// they change, so that renewal needs no restart. While changed files are
// unusable the last good ones serve.
func LoadServer(ca, cert, key string) (*tls.Config, error) {
	f, err := load(ca, cert, key)
	if err != nil {
		return nil, err
	}
	if role, _, err := Identity(f.pair.Leaf); err != nil {
		return nil, fmt.Errorf("load %s: %w", cert, err)
	} else if role != Manager {
		return nil, fmt.Errorf("load %s: it is a %s's certificate and a server's must be a manager's: 'quartet certs issue manager <name>'", cert, role)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2", "http/1.1"},
		// verify does the rest, against an authority that may change on disk.
		ClientAuth: tls.RequireAnyClientCert,
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			pair, _ := f.get()
			return pair, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			_, err := f.verify(cs, x509.ExtKeyUsageClientAuth)
			return err
		},
	}, nil
}

// LoadClient is the TLS configuration of a node or an operator: it shows cert
// and requires that the server is a manager of the authority ca, whatever
// address it was dialled by. It reads the files again as LoadServer does.
func LoadClient(ca, cert, key string) (*tls.Config, error) {
	f, err := load(ca, cert, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13,
		NextProtos: []string{"h2", "http/1.1"},
		// Not the host name but the role is verified, below.
		InsecureSkipVerify: true,
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			pair, _ := f.get()
			return pair, nil
		},
		VerifyConnection: func(cs tls.ConnectionState) error {
			role, err := f.verify(cs, x509.ExtKeyUsageServerAuth)
			if err == nil && role != Manager {
				err = fmt.Errorf("verify server: it is a %s, not a manager: check the manager's URL", role)
			}
			return err
		},
	}, nil
}

// files are an authority, a certificate and its key on disk, and what was last
// read from them.
type files struct {
	ca, cert, key string

	mu    sync.Mutex
	stamp [3]os.FileInfo // of what is below
	pair  *tls.Certificate
	roots *x509.CertPool
}

func load(ca, cert, key string) (*files, error) {
	f := &files{ca: ca, cert: cert, key: key}
	stamp, err := f.stat()
	if err != nil {
		return nil, fmt.Errorf("load certificate: %w: make it with 'quartet certs issue'", err)
	}
	if err := f.read(); err != nil {
		return nil, err
	}
	f.stamp = stamp
	return f, nil
}

func (f *files) stat() (s [3]os.FileInfo, err error) {
	for i, name := range []string{f.ca, f.cert, f.key} {
		if s[i], err = os.Stat(name); err != nil {
			return s, err
		}
	}
	return s, nil
}

// read sets pair and roots, or neither.
func (f *files) read() error {
	caCert, err := readCert(f.ca)
	if err != nil {
		return fmt.Errorf("load authority: %w", err)
	}
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(f.ca) // whole: two authorities during a change of authority
	if err != nil {
		return fmt.Errorf("load authority: %w", err)
	}
	roots.AppendCertsFromPEM(pem)
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return fmt.Errorf("load %s and %s: %w: issue both again with 'quartet certs issue'", f.cert, f.key, err)
	}
	if pair.Leaf == nil {
		if pair.Leaf, err = x509.ParseCertificate(pair.Certificate[0]); err != nil {
			return fmt.Errorf("load %s: %w", f.cert, err)
		}
	}
	if now := time.Now(); now.After(pair.Leaf.NotAfter) {
		return fmt.Errorf("load %s: it expired on %s: renew it with 'quartet certs issue'", f.cert, pair.Leaf.NotAfter.UTC().Format(time.RFC3339))
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}}); err != nil {
		return fmt.Errorf("load %s: not signed by %s (%q): %w: use the ca.crt beside it", f.cert, f.ca, caCert.Subject.CommonName, err)
	}
	f.pair, f.roots = &pair, roots
	return nil
}

// get is what the files hold, read again if they changed. An unusable change
// leaves stamp as it was, so that the next call tries again.
func (f *files) get() (*tls.Certificate, *x509.CertPool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if s, err := f.stat(); err == nil && !same(s, f.stamp) && f.read() == nil {
		f.stamp = s
	}
	return f.pair, f.roots
}

func same(a, b [3]os.FileInfo) bool {
	for i := range a {
		if !os.SameFile(a[i], b[i]) || a[i].Size() != b[i].Size() || !a[i].ModTime().Equal(b[i].ModTime()) {
			return false
		}
	}
	return true
}

// verify checks the peer's chain and returns its role. It runs on resumed
// sessions as well, so a renewed authority or an expiry reaches them.
func (f *files) verify(cs tls.ConnectionState, usage x509.ExtKeyUsage) (role string, err error) {
	if len(cs.PeerCertificates) == 0 {
		return "", errors.New("verify peer: it sent no certificate")
	}
	_, roots := f.get()
	opts := x509.VerifyOptions{Roots: roots, Intermediates: x509.NewCertPool(), KeyUsages: []x509.ExtKeyUsage{usage}}
	for _, c := range cs.PeerCertificates[1:] {
		opts.Intermediates.AddCert(c)
	}
	leaf := cs.PeerCertificates[0]
	if _, err := leaf.Verify(opts); err != nil {
		return "", fmt.Errorf("verify certificate of %q: %w", leaf.Subject.CommonName, err)
	}
	role, _, err = Identity(leaf)
	return role, err
}
