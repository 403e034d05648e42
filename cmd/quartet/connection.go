package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/pflag"

	quartetv1 "github.com/quartet-lb/quartet/api/quartet/v1"
	"github.com/quartet-lb/quartet/api/quartet/v1/quartetv1connect"
	"github.com/quartet-lb/quartet/certs"
	"github.com/quartet-lb/quartet/daemon"
	"github.com/quartet-lb/quartet/manager/object"
)

// DefaultManager is where a manager on this machine listens.
const DefaultManager = "https://127.0.0.1:7470"

// answerTimeout is how long a manager may be silent before it counts as gone.
var answerTimeout = 5 * time.Second

// connection says how to reach the manager.
type connection struct {
	flags         *pflag.FlagSet
	manager       string
	ca, cert, key string
}

func (c *connection) addFlags(to *pflag.FlagSet) {
	c.flags = pflag.NewFlagSet("connection", pflag.ContinueOnError)
	c.flags.StringVar(&c.manager, "manager", DefaultManager, "`URL` of the manager (QUARTET_MANAGER)")
	c.flags.StringVar(&c.ca, "ca", "", "certificate `file` of the fabric's authority (QUARTET_CA)")
	c.flags.StringVar(&c.cert, "cert", "", "operator's certificate `file` (QUARTET_CERT)")
	c.flags.StringVar(&c.key, "key", "", "operator's key `file` (QUARTET_KEY)")
	c.flags.String("config", "", "configuration `file` with these flags' names as keys (QUARTET_CONFIG; default ~/.config/quartet/config.yaml)")
	to.AddFlagSet(c.flags)
}

// resolve fills in what the command line leaves open: from the environment, then
// from the configuration file. File names there are relative to it.
func (c *connection) resolve() error {
	for _, name := range []string{"manager", "ca", "cert", "key", "config"} {
		flag := c.flags.Lookup(name)
		if v, ok := os.LookupEnv("QUARTET_" + strings.ToUpper(name)); ok && v != "" && !flag.Changed {
			if err := flag.Value.Set(v); err != nil {
				return invalid("QUARTET_%s: %s", strings.ToUpper(name), err)
			}
			flag.Changed = true
		}
	}
	config := c.flags.Lookup("config")
	if !config.Changed {
		dir, err := os.UserConfigDir()
		if err != nil {
			return nil //nolint:nilerr // without a home there is no file to read
		}
		file := filepath.Join(dir, "quartet", "config.yaml")
		if _, err := os.Stat(file); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err := config.Value.Set(file); err != nil {
			return err
		}
	}
	open := map[string]*string{}
	for name, value := range map[string]*string{"ca": &c.ca, "cert": &c.cert, "key": &c.key} {
		if !c.flags.Lookup(name).Changed {
			open[name] = value
		}
	}
	if err := daemon.ReadConfig(c.flags); err != nil {
		return invalid("%s", daemon.OneLine(err))
	}
	for _, value := range open {
		if *value != "" && !filepath.IsAbs(*value) {
			*value = filepath.Join(filepath.Dir(config.Value.String()), *value)
		}
	}
	return nil
}

// configured says whether anything was given of how to reach the manager.
func (c *connection) configured() bool {
	for _, name := range []string{"manager", "ca", "cert", "key", "config"} {
		if f := c.flags.Lookup(name); f.Changed || f.Value.String() != f.DefValue {
			return true
		}
	}
	return false
}

// client is the manager's API. It does not dial yet.
func (c *connection) client() (quartetv1connect.OperatorServiceClient, error) {
	if err := c.resolve(); err != nil {
		return nil, err
	}
	u, err := url.Parse(c.manager)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" || strings.Trim(u.Path, "/") != "" {
		return nil, invalid("--manager: %q is not a manager's URL: https://host:port", c.manager)
	}
	transport := &http.Transport{
		ForceAttemptHTTP2:   true,
		DialContext:         (&net.Dialer{Timeout: answerTimeout}).DialContext,
		TLSHandshakeTimeout: answerTimeout,
		// A manager that dies while it is waited for is noticed within twice this.
		HTTP2: &http.HTTP2Config{SendPingTimeout: answerTimeout, PingTimeout: answerTimeout},
	}
	if u.Scheme == "http" {
		if host := u.Hostname(); host != "localhost" {
			if a, err := netip.ParseAddr(host); err != nil || !a.IsLoopback() {
				return nil, invalid("--manager: %s is not encrypted, which is allowed to a loopback address only: https://host:port", c.manager)
			}
		}
	} else {
		for _, f := range []struct{ name, value string }{{"ca", c.ca}, {"cert", c.cert}, {"key", c.key}} {
			if f.value == "" {
				return nil, invalid("--%s is missing: the manager wants a certificate (--ca, --cert and --key, QUARTET_CA, QUARTET_CERT and QUARTET_KEY, or a configuration file)", f.name)
			}
		}
		if transport.TLSClientConfig, err = certs.LoadClient(c.ca, c.cert, c.key); err != nil {
			return nil, invalid("%s", daemon.OneLine(err))
		}
	}
	return quartetv1connect.NewOperatorServiceClient(&http.Client{Transport: transport}, strings.TrimSuffix(c.manager, "/"),
		connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
			return func(ctx context.Context, r connect.AnyRequest) (connect.AnyResponse, error) {
				response, err := next(ctx, r)
				if err != nil {
					err = c.explain(ctx, err)
				}
				return response, err
			}
		}))), nil
}

// refused are violations that the manager found.
type refused struct{ violations []*quartetv1.FieldViolation }

func (r *refused) Error() string {
	if len(r.violations) == 1 {
		return object.Format(r.violations[0])
	}
	return fmt.Sprintf("%d violations", len(r.violations))
}

// explain turns a failed call into one line that says which manager it was and
// what to check.
func (c *connection) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	unreachable := func(format string, a ...any) error {
		return &exitError{exitUnreachable, fmt.Sprintf("reach manager %s: ", c.manager) + fmt.Sprintf(format, a...)}
	}
	var connectErr *connect.Error
	if errors.As(err, &connectErr) && connect.IsWireError(err) {
		for _, d := range connectErr.Details() {
			if m, e := d.Value(); e == nil {
				if v, ok := m.(*quartetv1.FieldViolations); ok && len(v.GetViolations()) > 0 {
					return &refused{v.GetViolations()}
				}
			}
		}
		switch connectErr.Code() {
		case connect.CodeInvalidArgument, connect.CodeNotFound, connect.CodeFailedPrecondition:
			return invalid("%s", connectErr.Message())
		case connect.CodeUnauthenticated, connect.CodePermissionDenied:
			return unreachable("%s: check --cert, which must be an operator's", connectErr.Message())
		}
		return fmt.Errorf("manager %s: %s", c.manager, connectErr.Message())
	}
	var dns *net.DNSError
	var authority x509.UnknownAuthorityError
	var alert tls.AlertError
	var record tls.RecordHeaderError
	var timeout net.Error
	switch {
	case errors.As(err, &dns):
		return unreachable("no such host: check --manager")
	case errors.Is(err, syscall.ECONNREFUSED):
		return unreachable("connection refused: is quartet-manager running there? check --manager")
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return unreachable("no route: check --manager and the network")
	case errors.As(err, &timeout) && timeout.Timeout():
		return unreachable("no answer: check --manager and the network")
	case errors.As(err, &authority):
		return unreachable("its certificate is not signed by %s: check --ca", c.ca)
	case errors.As(err, &alert), strings.Contains(err.Error(), "remote error: tls:"):
		return unreachable("it refused %s (%s): check --cert and --key, and renew them with 'quartet certs issue'", c.cert, afterLast(err.Error(), "tls: "))
	case errors.As(err, &record), strings.Contains(err.Error(), "server gave HTTP response to HTTPS client"):
		return unreachable("it does not speak TLS: check the scheme and port of --manager")
	}
	text := err.Error()
	if connectErr != nil {
		text = connectErr.Message()
	}
	if httpStatus.MatchString(text) {
		return unreachable("something else answers there (%s): check the scheme and port of --manager", text)
	}
	return unreachable("%s", strings.ReplaceAll(text, "\n", " "))
}

// httpStatus is what connect says of an answer that is not of its protocol.
var httpStatus = regexp.MustCompile(`^[1-5][0-9][0-9] [A-Z][A-Za-z ]*$`)

func afterLast(s, sep string) string {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[i+len(sep):]
	}
	return s
}
