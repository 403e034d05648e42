// Package certs makes and checks the certificates by which Quartet's daemons
// and operators know each other.
//
// A fabric has one certificate authority of its own. Who somebody is stands in
// the certificate's URI name, quartet://<role>/<name>; every connection is
// mutual TLS 1.3. Clients check that the server is a manager rather than that
// its host name matches, because a node may dial a manager by any address.
package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Roles a certificate can give.
const (
	Manager  = "manager"
	Mux      = "mux"
	Host     = "host"
	Switch   = "switch"
	Operator = "operator"
)

// Roles are all roles, in the order help texts show them.
var Roles = []string{Manager, Mux, Host, Switch, Operator}

// Validity of what Init and Issue make. Issue again to renew: running
// processes pick the files up.
const (
	CAValidity   = 10 * 365 * 24 * time.Hour
	LeafValidity = 365 * 24 * time.Hour
	// skew lets a machine whose clock is behind accept a fresh certificate.
	skew = time.Hour
)

const uriScheme = "quartet"

// A name is a host name: RFC 1123 labels joined by dots.
var nameForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?(\.[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$`)

// Init makes a certificate authority in dir: ca.crt, and ca.key with mode 0600.
// It makes dir if need be and refuses to overwrite either file.
func Init(dir string) error { return initFor(dir, CAValidity) }

func initFor(dir string, validity time.Duration) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make certificate directory: %w", err)
	}
	crt, keyFile := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	for _, f := range []string{crt, keyFile} {
		if _, err := os.Lstat(f); err == nil {
			return fmt.Errorf("make authority: %s exists: choose another directory, or remove it if every certificate it signed may go", f)
		} else if !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("make authority: %w", err)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make authority key: %w", err)
	}
	t, err := template("Quartet CA", validity)
	if err != nil {
		return err
	}
	t.IsCA, t.BasicConstraintsValid, t.MaxPathLenZero = true, true, true
	t.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageCRLSign
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return fmt.Errorf("sign authority: %w", err)
	}
	return writePair(crt, keyFile, der, key)
}

// Issue writes <name>.crt and <name>.key (mode 0600) into dir, signed by the
// authority there. hosts are IP addresses and DNS names for clients other than
// ours, such as curl. It renews a certificate of the same role and name, with a
// new key, and refuses to replace one of another role.
func Issue(dir, role, name string, hosts []string) error {
	return issueFor(dir, role, name, hosts, LeafValidity)
}

func issueFor(dir, role, name string, hosts []string, validity time.Duration) error {
	if !slices.Contains(Roles, role) {
		return fmt.Errorf("issue certificate: %q is not a role: %s", role, strings.Join(Roles, ", "))
	}
	if len(name) > 253 || !nameForm.MatchString(name) || name == "ca" {
		return fmt.Errorf("issue certificate: %q is not a name: lower-case letters, digits and hyphens in labels joined by dots, and not \"ca\"", name)
	}
	caFile := filepath.Join(dir, "ca.crt")
	ca, err := readCert(caFile)
	if err != nil {
		return fmt.Errorf("issue certificate: %w: make one with 'quartet certs init --dir %s'", err, dir)
	}
	caPair, err := tls.LoadX509KeyPair(caFile, filepath.Join(dir, "ca.key"))
	if err != nil {
		return fmt.Errorf("issue certificate: read authority key %s: %w", filepath.Join(dir, "ca.key"), err)
	}
	if time.Now().After(ca.NotAfter) {
		return fmt.Errorf("issue certificate: %s expired on %s: make an authority in another directory", caFile, ca.NotAfter.UTC().Format(time.RFC3339))
	}
	crt, keyFile := filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if old, err := readCert(crt); err == nil {
		if r, _, err := Identity(old); err != nil || r != role {
			return fmt.Errorf("issue certificate: %s exists and is not a %s's: choose another name, or remove it", crt, role)
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("issue certificate: %w: remove the file to replace it", err)
	}
	t, err := template(name, validity)
	if err != nil {
		return err
	}
	if t.NotAfter.After(ca.NotAfter) {
		t.NotAfter = ca.NotAfter
	}
	t.URIs = []*url.URL{{Scheme: uriScheme, Host: role, Path: "/" + name}}
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	if role == Manager {
		t.ExtKeyUsage = append(t.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	for _, h := range hosts {
		if ip := net.ParseIP(h); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else if nameForm.MatchString(strings.ToLower(h)) {
			t.DNSNames = append(t.DNSNames, strings.ToLower(h))
		} else {
			return fmt.Errorf("issue certificate: %q is not a host: an IP address or a DNS name", h)
		}
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make key: %w", err)
	}
	der, err := x509.CreateCertificate(rand.Reader, t, ca, &key.PublicKey, caPair.PrivateKey)
	if err != nil {
		return fmt.Errorf("sign certificate: %w", err)
	}
	return writePair(crt, keyFile, der, key)
}

// Identity is the role and name that a certificate gives.
func Identity(cert *x509.Certificate) (role, name string, err error) {
	for _, u := range cert.URIs {
		if u.Scheme != uriScheme {
			continue
		}
		name = strings.TrimPrefix(u.Path, "/")
		if slices.Contains(Roles, u.Host) && nameForm.MatchString(name) {
			return u.Host, name, nil
		}
		return "", "", fmt.Errorf("certificate names %q: want quartet://<role>/<name>", u)
	}
	return "", "", fmt.Errorf("certificate of %q has no quartet://<role>/<name> URI: issue it with 'quartet certs issue'", cert.Subject.CommonName)
}

// PeerIdentity is Identity of the other side of a connection made with
// LoadServer's or LoadClient's configuration.
func PeerIdentity(cs tls.ConnectionState) (role, name string, err error) {
	if len(cs.PeerCertificates) == 0 {
		return "", "", errors.New("peer sent no certificate")
	}
	return Identity(cs.PeerCertificates[0])
}

// Read parses the first certificate in a PEM file.
func Read(file string) (*x509.Certificate, error) { return readCert(file) }

func readCert(file string) (*x509.Certificate, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read certificate: %w", err)
	}
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, fmt.Errorf("read certificate: %s is not a PEM certificate", file)
	}
	cert, err := x509.ParseCertificate(block.Bytes)
	if err != nil {
		return nil, fmt.Errorf("read certificate %s: %w", file, err)
	}
	return cert, nil
}

func template(cn string, validity time.Duration) (*x509.Certificate, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, fmt.Errorf("make serial number: %w", err)
	}
	if len(cn) > 64 { // RFC 5280 ub-common-name
		cn = cn[:64]
	}
	now := time.Now()
	return &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: cn, Organization: []string{"Quartet"}},
		NotBefore:    now.Add(-skew),
		NotAfter:     now.Add(validity),
	}, nil
}

// writePair renames both files into place, the key first. A reader between the
// two sees a pair that does not match; files.get then keeps its last good one.
func writePair(crt, keyFile string, der []byte, key *ecdsa.PrivateKey) error {
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return fmt.Errorf("encode key: %w", err)
	}
	if err := writeFile(keyFile, 0o600, &pem.Block{Type: "PRIVATE KEY", Bytes: keyDER}); err != nil {
		return err
	}
	return writeFile(crt, 0o644, &pem.Block{Type: "CERTIFICATE", Bytes: der})
}

func writeFile(name string, mode fs.FileMode, b *pem.Block) (err error) {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*") // mode 0600
	if err != nil {
		return fmt.Errorf("write %s: %w", name, err)
	}
	defer func() {
		if err != nil {
			_ = f.Close() // the first error is told
			_ = os.Remove(f.Name())
			err = fmt.Errorf("write %s: %w", name, err)
		}
	}()
	if err = pem.Encode(f, b); err != nil {
		return err
	}
	if err = f.Chmod(mode); err != nil {
		return err
	}
	if err = f.Sync(); err != nil {
		return err
	}
	if err = f.Close(); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
