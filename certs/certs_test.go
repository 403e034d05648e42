package certs

import (
	"crypto/tls"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func authority(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "certs")
	if err := Init(dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

func issue(t *testing.T, dir, role, name string, hosts ...string) {
	t.Helper()
	if err := Issue(dir, role, name, hosts); err != nil {
		t.Fatal(err)
	}
}

func server(t *testing.T, dir, name string) *tls.Config {
	t.Helper()
	c, err := LoadServer(filepath.Join(dir, "ca.crt"), filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func client(t *testing.T, dir, name string) *tls.Config {
	t.Helper()
	c, err := LoadClient(filepath.Join(dir, "ca.crt"), filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key"))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// handshake runs one connection over loopback and returns what each side saw.
func handshake(t *testing.T, srv, cli *tls.Config) (s, c tls.ConnectionState, serverErr, clientErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		raw, err := l.Accept()
		if err != nil {
			serverErr = err
			return
		}
		defer raw.Close()
		raw.SetDeadline(time.Now().Add(10 * time.Second))
		conn := tls.Server(raw, srv)
		if serverErr = conn.Handshake(); serverErr == nil {
			s = conn.ConnectionState()
			_, serverErr = conn.Write([]byte("k"))
		}
	}()
	raw, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	raw.SetDeadline(time.Now().Add(10 * time.Second))
	conn := tls.Client(raw, cli)
	if clientErr = conn.Handshake(); clientErr == nil {
		c = conn.ConnectionState()
		// In TLS 1.3 a client hears of its refusal with the first byte read.
		_, clientErr = io.ReadFull(conn, make([]byte, 1))
	}
	raw.Close()
	<-done
	return
}

func TestMutual(t *testing.T) {
	dir := authority(t)
	issue(t, dir, Manager, "m1", "10.0.0.1", "Manager.example")
	issue(t, dir, Mux, "mux1")
	s, c, serr, cerr := handshake(t, server(t, dir, "m1"), client(t, dir, "mux1"))
	if serr != nil || cerr != nil {
		t.Fatal(serr, cerr)
	}
	if role, name, err := PeerIdentity(s); role != Mux || name != "mux1" || err != nil {
		t.Errorf("server saw %s %s %v", role, name, err)
	}
	if role, name, err := PeerIdentity(c); role != Manager || name != "m1" || err != nil {
		t.Errorf("client saw %s %s %v", role, name, err)
	}
	if s.Version != tls.VersionTLS13 {
		t.Errorf("version %x", s.Version)
	}
	st, err := os.Stat(filepath.Join(dir, "mux1.key"))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("key mode %v %v", st.Mode(), err)
	}
	crt, err := Read(filepath.Join(dir, "m1.crt"))
	if err != nil || crt.VerifyHostname("manager.example") != nil || crt.VerifyHostname("10.0.0.1") != nil {
		t.Errorf("hosts are not in the certificate: %v %v %v", crt.DNSNames, crt.IPAddresses, err)
	}
}

func TestRefused(t *testing.T) {
	dir, other := authority(t), authority(t)
	issue(t, dir, Manager, "m1")
	issue(t, dir, Mux, "mux1")
	issue(t, other, Manager, "m1")
	issue(t, other, Operator, "eve")

	old := client(t, dir, "mux1")
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	bare := client(t, dir, "mux1")
	bare.GetClientCertificate = nil
	notManager := server(t, dir, "m1")
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "mux1.crt"), filepath.Join(dir, "mux1.key"))
	if err != nil {
		t.Fatal(err)
	}
	notManager.GetCertificate = func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil }

	for _, c := range []struct {
		name           string
		srv, cli       *tls.Config
		server, client string
	}{
		{"client of another authority", server(t, dir, "m1"), mixed(t, dir, other, "eve"), "unknown authority", "tls:"},
		{"server of another authority", server(t, other, "m1"), client(t, dir, "mux1"), "", "unknown authority"},
		{"TLS 1.2", server(t, dir, "m1"), old, "", "protocol version"},
		{"no client certificate", server(t, dir, "m1"), bare, "didn't provide a certificate", "certificate required"},
		{"server that is no manager", notManager, client(t, dir, "mux1"), "", "incompatible key usage"},
	} {
		_, _, serr, cerr := handshake(t, c.srv, c.cli)
		if serr == nil || !strings.Contains(serr.Error(), c.server) {
			t.Errorf("%s: server: %v, want %q", c.name, serr, c.server)
		}
		if cerr == nil || !strings.Contains(cerr.Error(), c.client) {
			t.Errorf("%s: client: %v, want %q", c.name, cerr, c.client)
		}
	}
}

// mixed trusts the authority in dir and shows a certificate of another.
func mixed(t *testing.T, dir, other, name string) *tls.Config {
	c := client(t, other, name)
	f, err := load(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "mux1.crt"), filepath.Join(dir, "mux1.key"))
	if err != nil {
		t.Fatal(err)
	}
	c.VerifyConnection = func(cs tls.ConnectionState) error {
		_, err := f.verify(cs, 2)
		return err
	}
	return c
}

// A renewed certificate is shown by configurations made before; half a renewal
// and garbage leave the last good one in place.
func TestRenewal(t *testing.T) {
	dir := authority(t)
	issue(t, dir, Manager, "m1")
	issue(t, dir, Host, "h1")
	srv, cli := server(t, dir, "m1"), client(t, dir, "h1")
	serials := func() (string, string) {
		t.Helper()
		s, c, serr, cerr := handshake(t, srv, cli)
		if serr != nil || cerr != nil {
			t.Fatal(serr, cerr)
		}
		return c.PeerCertificates[0].SerialNumber.String(), s.PeerCertificates[0].SerialNumber.String()
	}
	m, h := serials()
	issue(t, dir, Manager, "m1")
	issue(t, dir, Host, "h1")
	m2, h2 := serials()
	if m2 == m || h2 == h {
		t.Errorf("renewed certificates are not shown")
	}
	crt := filepath.Join(dir, "m1.crt")
	good, err := os.ReadFile(crt)
	if err != nil {
		t.Fatal(err)
	}
	issue(t, dir, Manager, "m1")
	renewed, err := os.ReadFile(crt)
	if err != nil {
		t.Fatal(err)
	}
	for _, half := range [][]byte{good, []byte("garbage")} {
		if err := os.WriteFile(crt, half, 0o644); err != nil {
			t.Fatal(err)
		}
		if m3, _ := serials(); m3 != m2 {
			t.Errorf("certificate changed to %s by half a renewal", m3)
		}
	}
	if err := os.WriteFile(crt, renewed, 0o644); err != nil {
		t.Fatal(err)
	}
	if m4, _ := serials(); m4 == m2 {
		t.Errorf("renewed certificate is not shown once whole")
	}
}

func TestBadInput(t *testing.T) {
	dir, other, empty := authority(t), authority(t), t.TempDir()
	issue(t, dir, Manager, "m1")
	issue(t, dir, Mux, "mux1")
	file := func(n string) string { return filepath.Join(dir, n) }
	garbage := file("garbage")
	if err := os.WriteFile(garbage, []byte("?"), 0o600); err != nil {
		t.Fatal(err)
	}
	expired := t.TempDir()
	if err := initFor(expired, -time.Second); err != nil {
		t.Fatal(err)
	}
	loadServer := func(ca, crt, key string) error { _, err := LoadServer(ca, crt, key); return err }
	loadClient := func(ca, crt, key string) error { _, err := LoadClient(ca, crt, key); return err }
	for _, c := range []struct {
		err  error
		want string
	}{
		{Init(dir), "ca.crt exists"},
		{Issue(empty, Mux, "m", nil), "quartet certs init"},
		{Issue(expired, Mux, "m", nil), "ca.crt expired on"},
		{Issue(dir, "boss", "b", nil), `"boss" is not a role: manager, mux, host, switch, operator`},
		{Issue(dir, Mux, "ca", nil), "is not a name"},
		{Issue(dir, Mux, "../x", nil), "is not a name"},
		{Issue(dir, Mux, "Mux", nil), "is not a name"},
		{Issue(dir, Mux, "a", []string{"a b"}), `"a b" is not a host`},
		{Issue(dir, Host, "mux1", nil), "is not a host's"},
		{loadClient(file("none.crt"), file("mux1.crt"), file("mux1.key")), "none.crt"},
		{loadClient(garbage, file("mux1.crt"), file("mux1.key")), "garbage is not a PEM certificate"},
		{loadClient(file("ca.crt"), file("mux1.crt"), file("m1.key")), "m1.key"},
		{loadClient(filepath.Join(other, "ca.crt"), file("mux1.crt"), file("mux1.key")), "not signed by"},
		{loadServer(file("ca.crt"), file("mux1.crt"), file("mux1.key")), "it is a mux's certificate"},
	} {
		if c.err == nil || !strings.Contains(c.err.Error(), c.want) || strings.Contains(c.err.Error(), "\n") {
			t.Errorf("got %v, want one line with %q", c.err, c.want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "a.crt")); err == nil {
		t.Errorf("a refused certificate was written")
	}
}

func TestExpired(t *testing.T) {
	dir := authority(t)
	issue(t, dir, Manager, "m1")
	issue(t, dir, Mux, "mux1")
	cli := client(t, dir, "mux1")
	if err := issueFor(dir, Mux, "mux1", nil, -time.Second); err != nil {
		t.Fatal(err)
	}
	_, err := LoadClient(filepath.Join(dir, "ca.crt"), filepath.Join(dir, "mux1.crt"), filepath.Join(dir, "mux1.key"))
	if err == nil || !strings.Contains(err.Error(), "mux1.crt: it expired on") {
		t.Errorf("load: %v", err)
	}
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "mux1.crt"), filepath.Join(dir, "mux1.key"))
	if err != nil {
		t.Fatal(err)
	}
	cli.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	if _, _, err, _ := handshake(t, server(t, dir, "m1"), cli); err == nil || !strings.Contains(err.Error(), "expired") {
		t.Errorf("server: %v", err)
	}
}
